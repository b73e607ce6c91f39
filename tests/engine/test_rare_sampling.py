"""The samplers that run on the host, against plain definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.backends.base import SamplingArrays
from localllm.backends.program import FloatArray
from localllm.backends.reference.sampling import sample
from localllm.engine.dry import Dry
from localllm.engine.kv_manager import SequenceBlocks
from localllm.engine.messages import Submit
from localllm.engine.rare_sampling import RareSampler, is_rare
from localllm.engine.sequence import Sequence
from localllm.sampling_params import SamplingParams
from tests.engine.fakes import WORDS, fake_vocabulary


def logits_of(*probabilities: float) -> FloatArray:
    row: FloatArray = np.log(np.array(probabilities)).astype(np.float32)
    return row


def arrays_of(params: SamplingParams, index: int) -> SamplingArrays:
    sampling = SamplingArrays.greedy(1)
    sampling.temperature[:] = params.temperature
    sampling.seed[:] = params.seed or 0
    sampling.index[:] = index
    sampling.top_k[:], sampling.top_p[:], sampling.min_p[:] = (
        params.top_k,
        params.top_p,
        params.min_p,
    )
    return sampling


def sequence_of(params: SamplingParams, tokens: Items[int] = (2,)) -> Sequence:
    return Sequence(Submit("a", tuple(tokens), params, frozenset()), 0, SequenceBlocks((), [], b""))


def draws(row: FloatArray, count: int = 300, **settings: float) -> list[int]:
    """Tokens of one seeded sequence, all from the same logits."""
    params = SamplingParams(seed=77, **settings)  # type: ignore[arg-type]
    sampler = RareSampler(params, fake_vocabulary())
    sequence = sequence_of(params)
    return [sampler.draw(row, arrays_of(params, i), 0, sequence) for i in range(count)]


def test_without_its_filters_it_draws_the_devices_tokens() -> None:
    rng = np.random.default_rng(4)
    for index in range(200):
        row = (rng.standard_normal(80) * 3).astype(np.float32)
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 5, 30])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=5,
        )
        sampling = arrays_of(params, index)
        token = RareSampler(params, fake_vocabulary()).draw(row, sampling, 0, sequence_of(params))
        assert token == sample(row[None], sampling)[0]


def test_typical_p_keeps_what_is_neither_sure_nor_odd() -> None:
    row = logits_of(0.5, 0.2, 0.15, 0.1, 0.05)
    probabilities = np.exp(row.astype(np.float64))
    entropy = -np.sum(probabilities * np.log(probabilities))
    order = np.argsort(np.abs(-np.log(probabilities) - entropy))
    for least in (0.1, 0.2, 0.4, 0.9):
        enough = int(np.searchsorted(np.cumsum(probabilities[order]), least)) + 1
        assert set(draws(row, typical_p=least)) == set(order[:enough].tolist())
    assert 0 not in draws(row, typical_p=0.2)  # the likeliest is not the most typical


def test_xtc_drops_the_likely_but_the_least_of_them() -> None:
    row = logits_of(0.4, 0.3, 0.2, 0.06, 0.04)
    assert set(draws(row, xtc_probability=1.0, xtc_threshold=0.1)) == {2, 3, 4}
    assert set(draws(row, xtc_probability=1.0, xtc_threshold=0.35)) == {0, 1, 2, 3, 4}
    assert set(draws(row, xtc_probability=1.0, xtc_threshold=0.1, top_k=3)) == {2}
    sometimes = draws(row, count=1000, xtc_probability=0.5, xtc_threshold=0.1)
    assert 0.4 * 500 * 0.8 < sometimes.count(0) < 0.4 * 500 * 1.2


def test_mirostat_allows_more_surprise_the_more_is_wanted() -> None:
    rng = np.random.default_rng(1)
    row = (rng.standard_normal(2000) * 2).astype(np.float32)
    bits = -np.log2(np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum())
    means = [
        np.mean(bits[draws(row, 400, mirostat=2, mirostat_tau=tau)]) for tau in (2.0, 4.0, 6.0)
    ]
    assert means == sorted(means)
    assert set(draws(row, 50, mirostat=2, mirostat_tau=0.0)) == {int(row.argmax())}


def test_mirostat_follows_its_rule() -> None:
    probabilities = (0.45, 0.27, 0.17, 0.11)
    row = logits_of(*probabilities)
    params = SamplingParams(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5, seed=3)
    sampler = RareSampler(params, fake_vocabulary())
    most = 2.0
    for index in range(40):
        kept = [p for p in probabilities if -math.log2(p) <= most] or [0.45]
        token = sampler.draw(row, arrays_of(params, index), 0, sequence_of(params))
        assert token < len(kept)
        most -= 0.5 * (-math.log2(kept[token] / sum(kept)) - 1.0)


def test_a_damaged_row_gives_no_token() -> None:
    for value in (np.nan, np.inf):
        row = np.array([0.0, value, 1.0], np.float32)
        assert draws(row, 1, typical_p=0.5) == [-1]
    assert draws(np.full(3, -np.inf, np.float32), 1, mirostat=2) == [-1]


def test_what_is_rare() -> None:
    assert not is_rare(SamplingParams(top_k=3, top_p=0.5, min_p=0.1, frequency_penalty=1.0))
    assert not is_rare(SamplingParams(temperature=0.0, typical_p=0.5, mirostat=2))
    assert is_rare(SamplingParams(temperature=0.0, dry_multiplier=1.0))
    assert is_rare(SamplingParams(typical_p=0.5))
    assert is_rare(SamplingParams(xtc_probability=0.1))
    assert is_rare(SamplingParams(mirostat=2))


def dry_by_definition(tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """Token by token: the longest end of `tokens` that once stood before it."""
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    clean = 0
    for token in reversed(tokens):
        if any(breaker in WORDS[token] for breaker in params.dry_sequence_breakers):
            break
        clean += 1
    lengths: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(clean, end + 1) and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length:
            lengths[tokens[end + 1]] = max(lengths.get(tokens[end + 1], 0), length)
    least, base = params.dry_allowed_length, params.dry_base
    return {
        token: params.dry_multiplier * base ** (length - least)
        for token, length in lengths.items()
        if length >= least
    }


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([12, 13, 14, WORDS.index("-")]), min_size=1, max_size=40),
    last_n=st.sampled_from([-1, 0, 1, 5, 20]),
    allowed=st.integers(1, 4),
)
def test_dry_agrees_with_its_definition(tokens: list[int], last_n: int, allowed: int) -> None:
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=("-",),
    )
    dry = Dry(params, fake_vocabulary())
    for n in range(1, len(tokens) + 1):  # as they come
        ids, lost = dry.penalties(np.array(tokens[:n], np.int32))
        found = dict(zip(ids.tolist(), lost.tolist(), strict=True))
        assert found == pytest.approx(dry_by_definition(tokens[:n], params))


def test_a_breaker_may_be_spread_over_tokens() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("ab", "x1"))
    a, b, x, one = (WORDS.index(letter) for letter in "abx1")
    repeated = [x, x, x, a, b, x, x, x]
    with_break, _ = Dry(params, fake_vocabulary()).penalties(np.array([*repeated, a, b], np.int32))
    assert not len(with_break)
    ids, _ = Dry(params, fake_vocabulary()).penalties(np.array(repeated, np.int32))
    assert set(ids.tolist()) == {a, x}
    assert one not in ids


def test_dry_stops_a_loop() -> None:
    row = np.zeros(50, np.float32)
    row[[10, 11]] = (5.0, 4.0)
    params = SamplingParams(temperature=0.0, dry_multiplier=2.0)
    sampler = RareSampler(params, fake_vocabulary())
    sequence = sequence_of(params, [10, 10, 10])
    assert sampler.draw(row, arrays_of(params, 0), 0, sequence) == 11
    assert sample(row[None], arrays_of(params, 0))[0] == 10
