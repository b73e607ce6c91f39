"""The sampler draws what the reference backend draws."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localllm.backends.base import SamplingArrays, mask_words  # noqa: E402
from localllm.backends.reference import sampling as reference  # noqa: E402
from localllm.backends.torch_common.sampling import adjusted, sample  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, ROWS = 301, 60


def arrays(seed: int) -> SamplingArrays:
    """Every filter and penalty, on some rows each, with masks and biases."""
    r = np.random.default_rng(seed)
    s = SamplingArrays.greedy(ROWS)
    s.temperature = r.choice([0, 0.3, 1, 2.5], ROWS).astype(np.float32)
    s.top_k = r.choice([0, 1, 7, 400], ROWS).astype(np.int32)
    s.top_p = r.choice([0.05, 0.7, 1], ROWS).astype(np.float32)
    s.min_p = r.choice([0, 0.1], ROWS).astype(np.float32)
    s.repetition_penalty = r.choice([1, 1.3], ROWS).astype(np.float32)
    s.presence_penalty = r.choice([0, 0.5], ROWS).astype(np.float32)
    s.frequency_penalty = r.choice([0, -0.2], ROWS).astype(np.float32)
    s.seed = r.integers(0, 2**63, ROWS).astype(np.uint64)
    s.choice = r.integers(0, 4, ROWS).astype(np.uint32)
    s.index = np.arange(ROWS, dtype=np.uint32)
    some = np.concatenate([r.choice(VOCAB, 5, replace=False) for _ in range(ROWS)])
    s.bias_start = s.history_start = np.arange(0, 5 * ROWS + 1, 5, dtype=np.int32)
    s.bias_ids, s.history_ids = some.astype(np.int32), some[::-1].astype(np.int32).copy()
    s.bias_values = r.normal(0, 2, some.size).astype(np.float32)
    s.history_counts = r.integers(0, 3, some.size).astype(np.int32)
    s.mask_rows = r.integers(-1, 2, ROWS).astype(np.int32)
    s.masks = r.integers(0, 2**32, 2 * mask_words(VOCAB), np.uint32)
    return s


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_references(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    logits[::5] = np.round(logits[::5])  # ties
    s = arrays(seed)
    expected = [reference.adjusted(row, s, r) for r, row in enumerate(logits)]
    np.testing.assert_array_equal(adjusted(torch.from_numpy(logits), s).numpy(), expected)
    assert sample(torch.from_numpy(logits), s).tolist() == reference.sample(logits, s).tolist()


@pytest.mark.parametrize("temperature", [0, 1])
def test_damaged_rows_give_no_token(temperature: float) -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[0, 7], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 9] = 100
    s = SamplingArrays.greedy(4)
    s.temperature[:] = temperature
    assert sample(torch.from_numpy(logits), s).tolist() == [-1, -1, -1, 9]
