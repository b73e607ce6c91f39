"""Samplers that few requests ask for: in numpy, over one row's logits, after the device is done.

The order of things and the random numbers are those of `SamplingParams` and `SamplingArrays`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from localllm.backends.base import SamplingArrays
from localllm.backends.program import FloatArray
from localllm.backends.reference.sampling import NO_TOKEN, adjusted, philox4x32
from localllm.engine.dry import Dry
from localllm.engine.sequence import Sequence
from localllm.engine.vocabulary import Vocabulary
from localllm.sampling_params import SamplingParams

Weights = npt.NDArray[np.float64]
_WORD = 0xFFFFFFFF


def is_rare(params: SamplingParams) -> bool:
    """Whether sampling needs more than the device's sampler does."""
    draws = params.temperature > 0
    filters = params.typical_p < 1 or params.xtc_probability > 0 or params.mirostat == 2
    return params.dry_multiplier > 0 or (draws and filters)


class RareSampler:
    """Draws one sequence's tokens, each once and in order."""

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary) -> None:
        self._params = params
        self._dry = Dry(params, vocabulary) if params.dry_multiplier > 0 else None
        self._mirostat = Mirostat(params) if params.mirostat == 2 else None

    def draw(self, logits: FloatArray, sampling: SamplingArrays, r: int, sequence: Sequence) -> int:
        """The next token by row r's raw logits [vocab]; NO_TOKEN for a damaged row."""
        z = adjusted(logits, sampling, r)
        if self._dry is not None:
            ids, lost = self._dry.penalties(np.array(sequence.tokens, np.int32))
            z[ids] -= lost.astype(np.float32)
        largest = z.max()
        if not np.isfinite(largest):
            return NO_TOKEN
        if self._params.temperature == 0:
            return int(np.argmax(z))
        order = np.argsort(-z, kind="stable")
        weights = np.exp((z[order].astype(np.float64) - largest) / self._params.temperature)
        numbers = _random_numbers(sampling, r)
        if self._mirostat is not None:
            return int(order[self._mirostat.draw(weights, numbers[0])])
        return int(order[_draw(self._filter(weights, numbers[1]), numbers[0])])

    def _filter(self, weights: Weights, chance: float) -> Weights:
        """Falling weights, zero where a filter takes the token away."""
        params = self._params
        kept = weights.copy()
        if params.top_k:
            kept[params.top_k :] = 0
        if params.typical_p < 1:
            _keep_typical(kept, params.typical_p)
        if params.top_p < 1:
            sums = np.cumsum(kept)
            kept[np.searchsorted(sums, params.top_p * sums[-1]) + 1 :] = 0
        if params.min_p > 0:
            kept[kept < params.min_p * kept.max()] = 0
        if chance < params.xtc_probability:
            likely = np.flatnonzero(kept >= params.xtc_threshold * kept.sum())
            kept[likely[:-1]] = 0
        return kept


class Mirostat:
    """Version 2 of Basu et al., "Mirostat" (2021): the largest surprise allowed follows what the
    drawn tokens had."""

    def __init__(self, params: SamplingParams) -> None:
        self._tau, self._eta = params.mirostat_tau, params.mirostat_eta
        self._most = 2 * params.mirostat_tau  # bits

    def draw(self, weights: Weights, u: float) -> int:
        """A place in the falling weights; the first may always be drawn."""
        with np.errstate(divide="ignore"):
            surprise = -np.log2(weights / weights.sum())
        kept = weights[: max(1, int(np.searchsorted(surprise, self._most, side="right")))]
        place = _draw(kept, u)
        self._most -= self._eta * (-math.log2(kept[place] / kept.sum()) - self._tau)
        return place


def _keep_typical(weights: Weights, least: float) -> None:
    """Keeps the tokens with the most usual surprise that together have `least` of the weight."""
    there = np.flatnonzero(weights)
    p = weights[there] / weights.sum()
    surprise = -np.log(p)
    by_distance = np.argsort(np.abs(surprise - np.sum(p * surprise)), kind="stable")
    enough = int(np.searchsorted(np.cumsum(p[by_distance]), least)) + 1
    weights[there[by_distance[enough:]]] = 0


def _draw(weights: Weights, u: float) -> int:
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, u * sums[-1], side="right"))


def _random_numbers(sampling: SamplingArrays, r: int) -> tuple[float, float]:
    """For the draw, the same as the device's, and for XTC's chance."""
    seed = int(sampling.seed[r])
    counter = (int(sampling.index[r]), int(sampling.choice[r]), 0, 0)
    first, second, *_ = philox4x32(counter, (seed & _WORD, seed >> 32))
    return (first >> 8) * 2.0**-24, (second >> 8) * 2.0**-24
