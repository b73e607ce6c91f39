"""The oracle's sampler, rule by rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from localllm.backends.base import SamplingArrays
from localllm.backends.program import FloatArray
from localllm.backends.reference.sampling import philox4x32, sample, uniform


def rows_of(row: Sequence[float], count: int) -> FloatArray:
    return np.tile(np.array(row, np.float32), (count, 1))


def draws(row: Sequence[float], count: int = 400, **settings: float) -> list[int]:
    """Tokens 0..count-1 of one seeded sequence, all from the same logits."""
    sampling = SamplingArrays.greedy(count)
    sampling.temperature[:] = 1.0
    sampling.seed[:] = 1234
    sampling.index[:] = np.arange(count)
    for name, value in settings.items():
        getattr(sampling, name)[:] = value
    return [int(token) for token in sample(rows_of(row, count), sampling)]


def log_probabilities(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers that come with the published algorithm
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox(counter: tuple[int, int, int, int], key: tuple[int, int], expected: str) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key)) == expected


def test_uniform_uses_every_part_of_its_key() -> None:
    seen = {
        uniform(seed, choice, index)
        for seed in (0, 1, 1 << 32)
        for choice in (0, 1)
        for index in (0, 1)
    }
    assert len(seen) == 12
    assert all(0 <= u < 1 for u in seen)
    assert uniform(0, 0, 0) == (0x6627E8D5 >> 8) / 2**24


def test_greedy_takes_the_lower_id_of_a_tie() -> None:
    assert sample(rows_of([1, 5, 5, 2], 1), SamplingArrays.greedy(1)).tolist() == [1]


def test_draws_follow_the_distribution() -> None:
    counts = np.bincount(draws(log_probabilities(0.5, 0.3, 0.2), 4000), minlength=3)
    expected = np.array([2000, 1200, 800])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-squared, p = 0.001


def test_temperature_sharpens_and_flattens() -> None:
    row = log_probabilities(0.6, 0.3, 0.1)
    cold, warm, hot = (draws(row, temperature=t).count(0) for t in (0.3, 1.0, 5.0))
    assert cold > warm > hot
    assert set(draws(row, temperature=0.01)) == {0}


def test_a_draw_depends_on_its_own_row_alone() -> None:
    row = log_probabilities(0.4, 0.3, 0.2, 0.1)
    together = draws(row, 50)
    for index in (0, 17, 49):
        sampling = SamplingArrays.greedy(1)
        sampling.temperature[:], sampling.seed[:], sampling.index[:] = 1.0, 1234, index
        assert sample(rows_of(row, 1), sampling).tolist() == [together[index]]


def test_the_draw_is_the_first_token_past_u() -> None:
    """In order of falling probability, ties by id: 2, 0, 3, 1."""
    row = log_probabilities(0.25, 0.1, 0.4, 0.25)
    edges = np.cumsum([0.4, 0.25, 0.25, 0.1])
    for index, token in enumerate(draws(row, 60)):
        rank = int(np.searchsorted(edges, uniform(1234, 0, index), side="right"))
        assert token == (2, 0, 3, 1)[rank]


def test_top_k_top_p_and_min_p_keep_a_head() -> None:
    row = log_probabilities(0.4, 0.3, 0.2, 0.06, 0.04)
    assert set(draws(row)) == {0, 1, 2, 3, 4}
    assert set(draws(row, top_k=2)) == {0, 1}
    assert set(draws(row, top_p=0.65)) == {0, 1}
    assert set(draws(row, top_p=0.75)) == {0, 1, 2}
    assert set(draws(row, top_p=1e-6)) == {0}
    assert set(draws(row, min_p=0.45)) == {0, 1, 2}
    assert set(draws(row, min_p=1.0)) == {0}
    assert set(draws(row, top_k=2, top_p=0.55)) == {0}  # of what top_k left, 0 has 4/7
    assert set(draws(row, top_k=100)) == {0, 1, 2, 3, 4}


def test_filters_keep_the_shares_of_what_is_left() -> None:
    kept = draws(log_probabilities(0.5, 0.25, 0.25), 3000, top_k=2)
    assert abs(kept.count(0) / 3000 - 2 / 3) < 0.03


def test_bias_is_added_before_anything_else() -> None:
    sampling = SamplingArrays.greedy(2)
    sampling.bias_start = np.array([0, 0, 2], np.int32)
    sampling.bias_ids = np.array([2, 0], np.int32)
    sampling.bias_values = np.array([3.5, -100], np.float32)
    assert sample(rows_of([3, 2, 0], 2), sampling).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("penalty", "value", "expected"),
    [
        ("repetition_penalty", 2.0, [2.0, -2.0, 3.9, -1.5]),  # 4/2, -1*2
        ("presence_penalty", 1.5, [4.0, -2.5, 3.9, -1.5]),  # token 0 is in the prompt alone
        ("frequency_penalty", 0.5, [4.0, -2.5, 3.9, -1.5]),  # token 1 came three times
    ],
)
def test_penalties(penalty: str, value: float, expected: list[float]) -> None:
    """Probed by a bias that lifts one token after the other just above the rest."""
    row, history, counts = [4.0, -1.0, 3.9, -1.5], [0, 1], [0, 3]
    for token, logit in enumerate(expected):
        for margin, wins in ((0.01, True), (-0.01, False)):
            sampling = SamplingArrays.greedy(1)
            getattr(sampling, penalty)[:] = value
            sampling.history_start = np.array([0, 2], np.int32)
            sampling.history_ids = np.array(history, np.int32)
            sampling.history_counts = np.array(counts, np.int32)
            rival = len(row)
            logits = rows_of([*row, logit - margin], 1)
            # Others are pushed down; bias comes before penalties, which scale it by two at most.
            others = [t for t in range(len(row)) if t != token]
            sampling.bias_start = np.array([0, len(others)], np.int32)
            sampling.bias_ids = np.array(others, np.int32)
            sampling.bias_values = np.full(len(others), -1000, np.float32)
            assert sample(logits, sampling).tolist() == [token if wins else rival]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_rows_give_no_token(temperature: float) -> None:
    inf, nan = float("inf"), float("nan")
    logits = np.array([[1, nan, 2], [inf, 0, 0], [-inf] * 3, [-inf, 1, -inf]], np.float32)
    sampling = SamplingArrays.greedy(4)
    sampling.temperature[:] = temperature
    assert sample(logits, sampling).tolist() == [-1, -1, -1, 1]
