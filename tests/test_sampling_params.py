"""Sampling parameters of the wrong type are refused by name, before the engine sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec, ThinkingBudget
from localllm.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, bad) for name in ("top_k", "n", "max_tokens", "seed") for bad in (1.5, True, "3")),
        ("top_k", None),
        ("n", None),
        ("max_tokens", float("inf")),
        *(("stop_token_ids", bad) for bad in ([1.5], [-1], [True], ["3"], 3, "ab")),
        *(("temperature", bad) for bad in (None, "hot", 1j, True, float("nan"))),
        *((name, "1") for name in ("top_p", "min_p", "repetition_penalty")),
        *((name, None) for name in ("presence_penalty", "frequency_penalty")),
        *(
            ("logit_bias", bad)
            for bad in (None, [1], {1.5: 1.0}, {"1": 1.0}, {1: "x"}, {1: float("inf")})
        ),
    ],
)
def test_wrong_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numbers_of_every_right_type_are_taken() -> None:
    params = SamplingParams(
        temperature=1,
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(4),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 0]),  # type: ignore[arg-type]
        logit_bias={7: -1},
    )
    assert (params.temperature, params.top_p, params.max_tokens) == (1, 0.5, 4)
    assert params.stop_token_ids == (3, 0)
    assert SamplingParams(max_tokens=None, seed=None).seed is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, bad) for name in ("min_tokens", "logprobs", "mirostat") for bad in (1.5, "3", -1)),
        *(("bad_words", bad) for bad in (3, [3], [""], ["x" * 1001], ["x"] * 1001)),
        *(("dry_sequence_breakers", bad) for bad in (None, [None], ["a", ""])),
        *(("typical_p", bad) for bad in (0.0, 1.1, None, "1")),
        ("logprobs", 101),
        ("prompt_logprobs", 101),
        ("max_tokens", 0),
        ("mirostat", 1),
        ("dry_base", 0.9),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("xtc_threshold", 1.5),
        ("mirostat_tau", float("nan")),
    ],
)
def test_the_rarer_fields_are_checked_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_fields_that_go_together() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(bad_words="no").bad_words == ("no",)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="more than the 3 of max_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_grammars_and_budgets_are_checked() -> None:
    with pytest.raises(RequestError, match="unknown kind"):
        GrammarSpec("xml")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="after"):
        GrammarSpec("json_object", after=("",))
    with pytest.raises(RequestError, match="0 or more"):
        ThinkingBudget(-1, ("x",), (1,))
    with pytest.raises(RequestError, match="end the thinking"):
        ThinkingBudget(1, ("x",), ())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("x" * 100_000, "stop: a text of 100000 characters; 1000 are the most"),
        (["x"] * 1001, "stop: 1001 texts; 1000 are the most"),
    ],
)
def test_too_much_text_is_told_from_too_many_texts(texts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(stop=texts)
