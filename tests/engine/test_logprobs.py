"""Log-probabilities: their numbers, and that nothing but the prompt decides them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.core import EngineCore
from localllm.engine.logprobs import token_logprobs
from localllm.engine.messages import SequenceNews, Submit, TokenLogprobs
from localllm.errors import RequestError
from localllm.sampling_params import SamplingParams
from tests.engine.fakes import VOCAB, expected_row, fake_core, run, tokens_of
from tests.engine.test_core import prompts

ASKS = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, prompt_logprobs=2)


def submit(name: str, prompt: tuple[int, ...], params: SamplingParams = ASKS) -> Submit:
    return Submit(name, prompt, params, eos_ids=frozenset([0]))


@given(
    row=st.lists(st.sampled_from([-1e4, -3.5, 0.0, 0.25, 0.25, 7.0, 88.0, 1e4]), min_size=1),
    token=st.integers(0, 10**6),
    top=st.integers(0, 8),
)
def test_agrees_with_the_definition(row: list[float], token: int, top: int) -> None:
    token %= len(row)
    told = token_logprobs(np.array(row, np.float32), token, top)
    largest = max(row)
    total = largest + math.log(math.fsum(math.exp(x - largest) for x in row))
    assert told.logprob == pytest.approx(row[token] - total, rel=1e-6, abs=1e-6)
    assert told.rank == 1 + sum(x > row[token] for x in row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [best for best, _ in told.top] == order
    if told.rank == 1 and top:
        assert told.logprob == told.top[0][1]  # exactly: lm-eval compares them


def test_a_row_is_computed_by_itself() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 1003)).astype(np.float32)
    for i in range(5):
        assert token_logprobs(rows[i], 7, 4) == token_logprobs(rows[i].copy(), 7, 4)


def told_of(news: Sequence[SequenceNews]) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    prompt = [one for part in news for one in part.prompt_logprobs]
    return prompt, [one for part in news for one in part.logprobs]


def test_they_are_those_of_the_raw_distribution_in_order() -> None:
    prompt = prompts(16)[12]
    params = replace(ASKS, temperature=1.0, logit_bias={3: 50.0}, frequency_penalty=1.0, seed=1)
    news = run(fake_core(tokens=16, rows=6), submit("a", prompt, params))["a"]
    of_prompt, of_output = told_of(news)
    tokens = [*prompt, *tokens_of(news)]
    assert [one.token for one in (*of_prompt, *of_output)] == tokens[1:]
    for position, one in enumerate((*of_prompt, *of_output)):
        top = 2 if position < len(prompt) - 1 else 3
        row = expected_row(tokens[: position + 1])
        assert one == token_logprobs(row, tokens[position + 1], top)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fake_core((None, 24), tokens=48),
        lambda: fake_core((None, 24), tokens=5),
        lambda: fake_core((None, 24), rows=2),
        lambda: fake_core((None, 24), spare_blocks=2),
    ],
    ids=["budget of 48", "budget of 5", "two rows", "small pool"],
)
def test_company_chunks_cache_and_preemption_change_none(make: Callable[[], EngineCore]) -> None:
    requests = [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(12))]
    alone = {r.sequence_id: told_of(run(fake_core((None, 24)), r)[r.sequence_id]) for r in requests}
    core = make()
    for _ in range(2):  # the second time from a warm cache
        together = run(core, *requests)
        assert {name: told_of(news) for name, news in together.items()} == alone
        core.check_integrity()


def test_without_output_only_the_prompt_is_told() -> None:
    nothing = SamplingParams(max_tokens=0, prompt_logprobs=1)
    core = fake_core(tokens=16, rows=4)
    for prompt in (prompts(16)[3], (5,)):
        news = run(core, submit("a", prompt, nothing))["a"]
        told, _ = told_of(news)
        assert [one.token for one in told] == list(prompt[1:])
        assert not tokens_of(news)
        assert news[-1].finish_reason == "length"
    full = (1,) * 200  # no token more would fit
    assert run(core, submit("full", full, nothing))["full"][-1].finish_reason == "length"
    assert run(core, submit("full", full))["full"][-1].finish_reason == "error"


def test_no_output_at_all_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_one_prompt_token_has_no_predecessor() -> None:
    news = run(fake_core(), submit("a", (7,)))["a"]
    of_prompt, of_output = told_of(news)
    assert not of_prompt
    assert [one.token for one in of_output] == tokens_of(news)
    assert all(one.top[0][1] == one.logprob for one in of_output)
    assert all(len(one.top) == 3 and one.token < VOCAB for one in of_output)
