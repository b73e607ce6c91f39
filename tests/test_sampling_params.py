"""Sampling parameters of the wrong type are refused by name, before the engine sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.errors import RequestError
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
