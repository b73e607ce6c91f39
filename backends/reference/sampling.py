"""The sampler, one row at a time, by the rules that `SamplingArrays` states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localllm.backends.base import Int32Array, SamplingArrays, mask_words
from localllm.backends.program import FloatArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

NO_TOKEN = -1


def sample(logits: FloatArray, sampling: SamplingArrays) -> Int32Array:
    """One token for each row of logits [R, vocab]."""
    return np.array([_sample_row(x, sampling, r) for r, x in enumerate(logits)], np.int32)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(_MULTIPLIERS[0] * c0, 1 << 32)
        high1, low1 = divmod(_MULTIPLIERS[1] * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1), for output token `index` of choice `choice`."""
    word = philox4x32((index, choice, 0, 0), (seed & _WORD, seed >> 32))[0]
    return (word >> 8) * 2.0**-24


def adjusted(logits: FloatArray, sampling: SamplingArrays, r: int) -> FloatArray:
    """Row r's logits after bias, penalties and mask."""
    x = logits.copy()
    biased = slice(sampling.bias_start[r], sampling.bias_start[r + 1])
    x[sampling.bias_ids[biased]] += sampling.bias_values[biased]
    _penalize(x, sampling, r)
    if (mask_row := sampling.mask_rows[r]) >= 0:
        words = mask_words(len(x))
        mask = sampling.masks[mask_row * words : (mask_row + 1) * words]
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(x))
        x[allowed == 0] = -np.inf
    return x


def _sample_row(logits: FloatArray, sampling: SamplingArrays, r: int) -> int:
    x = adjusted(logits, sampling, r)
    largest = x.max()
    if not np.isfinite(largest):  # a damaged row; max passes NaN on
        return NO_TOKEN
    if sampling.temperature[r] == 0:
        return int(np.argmax(x))
    order = np.argsort(-x, kind="stable")
    weights = np.exp((x[order].astype(np.float64) - largest) / sampling.temperature[r])
    kept = _filter(weights, sampling, r)
    u = uniform(int(sampling.seed[r]), int(sampling.choice[r]), int(sampling.index[r]))
    sums = np.cumsum(kept)
    drawn = np.searchsorted(sums, u * sums[-1], side="right")
    return int(order[drawn])


def _penalize(x: FloatArray, sampling: SamplingArrays, r: int) -> None:
    seen = slice(sampling.history_start[r], sampling.history_start[r + 1])
    ids, counts = sampling.history_ids[seen], sampling.history_counts[seen]
    values = x[ids]
    repetition = sampling.repetition_penalty[r]
    values = np.where(values > 0, values / repetition, values * repetition)
    taken = sampling.presence_penalty[r] + sampling.frequency_penalty[r] * counts.astype(np.float32)
    values -= np.where(counts > 0, taken, np.float32(0))
    x[ids] = values


def _filter(
    weights: npt.NDArray[np.float64], sampling: SamplingArrays, r: int
) -> npt.NDArray[np.float64]:
    """The head of the falling weights that top_k, top_p and min_p leave."""
    if top_k := sampling.top_k[r]:
        weights = weights[:top_k]
    if (top_p := sampling.top_p[r]) < 1:
        sums = np.cumsum(weights)
        weights = weights[: np.searchsorted(sums, float(top_p) * sums[-1]) + 1]
    if (min_p := sampling.min_p[r]) > 0:
        weights = weights[weights >= min_p]
    return weights
