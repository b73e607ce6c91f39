"""Sampling on the device gives the reference backend's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.base import SamplingArrays, mask_words
from localllm.backends.cuda.kernels.sampling import DeviceSampling, adjusted, sample, uniform
from localllm.backends.program import FloatArray
from localllm.backends.reference import sampling as reference

pytestmark = pytest.mark.torch

VOCAB = 70  # no multiple of a mask's words


def random_sampling(rows: int, rng: np.random.Generator) -> SamplingArrays:
    """Every rule in some row, and in most rows several."""
    s = SamplingArrays.greedy(rows)
    s.temperature[:] = rng.choice([0, 0.3, 1, 2], rows)
    s.top_k[:] = rng.choice([0, 1, 7, 200], rows)
    s.top_p[:] = rng.choice([1, 0.9, 0.3, 0.01], rows)
    s.min_p[:] = rng.choice([0, 0.05, 0.5], rows)
    s.repetition_penalty[:] = rng.choice([1, 1.3], rows)
    s.presence_penalty[:] = rng.choice([0, 0.7], rows)
    s.frequency_penalty[:] = rng.choice([0, -0.2, 0.4], rows)
    s.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    s.choice[:] = rng.integers(0, 4, rows)
    s.index[:] = rng.integers(0, 2**32, rows, dtype=np.uint32)
    s.bias_start, s.bias_ids = _ranges(rows, rng)
    s.bias_values = rng.normal(0, 3, len(s.bias_ids)).astype(np.float32)
    s.history_start, s.history_ids = _ranges(rows, rng)
    s.history_counts = rng.integers(0, 3, len(s.history_ids)).astype(np.int32)
    s.mask_rows = rng.integers(-1, 3, rows).astype(np.int32)
    s.masks = rng.integers(0, 2**32, 3 * mask_words(VOCAB), dtype=np.uint32)
    return s


def _ranges(
    rows: int, rng: np.random.Generator
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Distinct tokens for each row, none for some."""
    ids = [rng.permutation(VOCAB)[: rng.integers(0, 9)] for _ in range(rows)]
    start = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    return start, np.concatenate(ids).astype(np.int32)


def normal(rng: np.random.Generator, rows: int) -> FloatArray:
    return rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)


def test_tokens_are_those_of_the_reference(rng: np.random.Generator) -> None:
    rows = 120
    logits, sampling = normal(rng, rows), random_sampling(rows, rng)
    device = DeviceSampling.from_host(sampling, "cpu")
    z = adjusted(torch.from_numpy(logits), device).numpy()
    for r in range(rows):
        np.testing.assert_array_equal(z[r], reference.adjusted(logits[r], sampling, r))
    tokens = sample(torch.from_numpy(logits), device)
    np.testing.assert_array_equal(tokens.numpy(), reference.sample(logits, sampling))
    assert len(set(tokens.tolist())) > VOCAB // 2


@pytest.mark.parametrize("largest_k", [1, 9, VOCAB + 5])
def test_a_short_head_is_ordered_without_sorting_the_rest(
    largest_k: int, rng: np.random.Generator
) -> None:
    """Many ties, zeros of both signs among them, and rows that are greedy."""
    rows = 60
    logits = rng.integers(-2, 3, (rows, VOCAB)).astype(np.float32)
    logits *= rng.choice([-1.0, 1.0], (rows, VOCAB)).astype(np.float32)
    sampling = random_sampling(rows, rng)
    sampling.top_k[:] = rng.integers(1, largest_k + 1, rows)
    sampling.top_k[sampling.temperature == 0] = 0
    device = DeviceSampling.from_host(sampling, "cpu")
    assert device.head == sampling.top_k.max()
    tokens = sample(torch.from_numpy(logits), device)
    np.testing.assert_array_equal(tokens.numpy(), reference.sample(logits, sampling))


def test_a_row_keeps_its_token_in_any_company(rng: np.random.Generator) -> None:
    logits, sampling = normal(rng, 5), random_sampling(5, rng)
    whole = sample(torch.from_numpy(logits), DeviceSampling.from_host(sampling, "cpu"))
    alone = SamplingArrays.greedy(1)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
        setattr(alone, name, getattr(sampling, name)[3:4])
    for name in ("presence_penalty", "frequency_penalty", "choice", "index", "mask_rows"):
        setattr(alone, name, getattr(sampling, name)[3:4])
    alone.masks = sampling.masks
    for start, *arrays in (
        ("bias_start", "bias_ids", "bias_values"),
        ("history_start", "history_ids", "history_counts"),
    ):
        first, last = getattr(sampling, start)[3:5]
        setattr(alone, start, np.array([0, last - first], np.int32))
        for name in arrays:
            setattr(alone, name, getattr(sampling, name)[first:last])
    token = sample(torch.from_numpy(logits[3:4]), DeviceSampling.from_host(alone, "cpu"))
    assert token[0] == whole[3]


def test_random_numbers_are_those_of_the_reference(rng: np.random.Generator) -> None:
    sampling = random_sampling(40, rng)
    u = uniform(DeviceSampling.from_host(sampling, "cpu"))
    expected = [
        reference.uniform(int(seed), int(choice), int(index))
        for seed, choice, index in zip(sampling.seed, sampling.choice, sampling.index, strict=True)
    ]
    assert u.tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lower_id_and_damage_to_none(temperature: float) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[0, [20, 9, 40]] = 5.0
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 8] = -torch.inf
    sampling = SamplingArrays.greedy(5)
    sampling.temperature[:] = temperature
    sampling.top_k[:] = 1
    tokens = sample(logits, DeviceSampling.from_host(sampling, "cpu"))
    assert tokens.tolist() == [9, -1, -1, -1, 0]


def test_no_rows() -> None:
    device = DeviceSampling.from_host(SamplingArrays.greedy(0), "cpu")
    assert sample(torch.empty(0, VOCAB), device).shape == (0,)
