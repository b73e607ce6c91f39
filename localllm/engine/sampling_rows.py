"""Sampling parameters as arrays, one entry per logit row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from localllm.backends.base import Int32Array, SamplingArrays
from localllm.engine.sequence import Sequence
from localllm.sampling_params import SamplingParams

_NO_SAMPLING = SamplingParams(temperature=0.0, seed=0)  # rows whose logits alone are wanted
_LARGEST_TOP_K = 2**31 - 1


class SamplingRows:
    """From step to step mostly the same sequences ask, so what does not change is kept."""

    def __init__(self) -> None:
        self._rows: list[Sequence] = []
        self._arrays = _fixed_arrays([])
        self._histories: dict[Sequence, TokenHistory] = {}

    def arrays(self, rows: list[Sequence]) -> SamplingArrays:
        """Valid until the next call."""
        if rows != self._rows:
            self._rows = rows
            self._arrays = _fixed_arrays(rows)
            self._histories = {
                s: self._histories.get(s) or TokenHistory() for s in rows if _has_penalty(s)
            }
        self._arrays.index = np.fromiter((s.n_generated for s in rows), np.uint32, len(rows))
        if self._histories:
            self._add_histories(rows)
        return self._arrays

    def _add_histories(self, rows: list[Sequence]) -> None:
        for sequence, history in self._histories.items():
            history.read(sequence)
        parts = [self._histories.get(sequence, _NO_HISTORY) for sequence in rows]
        self._arrays.history_start = _starts(len(part.ids) for part in parts)
        self._arrays.history_ids = _joined(part.ids for part in parts)
        self._arrays.history_counts = _joined(part.counts for part in parts)


@dataclass
class TokenHistory:
    """The distinct tokens of prompt and output with their counts in the output."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    _places: dict[int, int] = field(default_factory=dict)
    _read: int = 0

    def read(self, sequence: Sequence) -> None:
        """Takes what the sequence has gained since the last call."""
        n_prompt = len(sequence.request.prompt)
        for i in range(self._read, len(sequence.tokens)):
            token = sequence.tokens[i]
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += i >= n_prompt
        self._read = len(sequence.tokens)


_NO_HISTORY = TokenHistory()


def _params(sequence: Sequence) -> SamplingParams:
    return _NO_SAMPLING if sequence.request.prompt_logits else sequence.request.params


def _has_penalty(sequence: Sequence) -> bool:
    params = _params(sequence)
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _fixed_arrays(rows: list[Sequence]) -> SamplingArrays:
    """Everything but the index and the histories."""
    params = [_params(sequence) for sequence in rows]
    biases = [sorted(p.logit_bias.items()) for p in params]
    n = len(rows)
    return SamplingArrays(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([min(p.top_k, _LARGEST_TOP_K) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
        presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
        seed=np.array([p.seed or 0 for p in params], np.uint64),
        choice=np.array([s.request.choice for s in rows], np.uint32),
        index=np.zeros(n, np.uint32),
        bias_start=_starts(len(b) for b in biases),
        bias_ids=np.array([token for b in biases for token, _ in b], np.int32),
        bias_values=np.array([value for b in biases for _, value in b], np.float32),
        history_start=np.zeros(n + 1, np.int32),
        history_ids=np.empty(0, np.int32),
        history_counts=np.empty(0, np.int32),
        mask_rows=np.full(n, -1, np.int32),
        masks=np.empty(0, np.uint32),
    )


def _starts(lengths: Iterable[int]) -> Int32Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _joined(parts: Iterable[array[int]]) -> Int32Array:
    return np.array(sum(parts, array("i")), np.int32)
