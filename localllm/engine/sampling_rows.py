"""Sampling parameters as arrays, one entry per logit row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from localllm.backends.base import Int32Array, MaskArray, SamplingArrays
from localllm.engine.restrictions import Restriction
from localllm.engine.sequence import Sequence
from localllm.sampling_params import SamplingParams

_NO_SAMPLING = SamplingParams(temperature=0.0, seed=0)  # rows whose logits alone are wanted
_LARGEST_TOP_K = 2**31 - 1

Rows: TypeAlias = "list[Sequence | None]"
"""Who draws a token from each logit row; None for rows whose logits alone are wanted."""


class SamplingRows:
    """From step to step mostly the same sequences ask, so what does not change is kept."""

    def __init__(self, vocab_words: int) -> None:
        self._rows: Rows = []
        self._arrays = _fixed_arrays([])
        self._histories: dict[Sequence, TokenHistory] = {}
        self._restricted: list[tuple[int, Restriction]] = []  # with their rows
        self._active: list[Restriction] = []  # in the order of their masks
        self._masks: MaskArray = np.empty((0, vocab_words), np.uint32)

    def arrays(self, rows: Rows, ahead: int = 0) -> SamplingArrays:
        """Valid until the next call, save the masks: they are for `fill_masks` to write.

        `ahead` tokens of each row are still to come: then nobody has penalties or masks.
        """
        if rows != self._rows:
            self._rows = rows
            self._arrays = _fixed_arrays(rows)
            self._histories = {
                s: self._histories.get(s) or TokenHistory()
                for s in rows
                if s and s.request.params.has_penalty
            }
            self._restricted = [
                (r, s.restriction) for r, s in enumerate(rows) if s and s.restriction is not None
            ]
        generated = (s.n_generated + ahead if s else 0 for s in rows)
        self._arrays.index = np.fromiter(generated, np.uint32, len(rows))
        if self._histories:
            self._add_histories(rows)
        self._active = []
        if self._restricted:
            self._add_masks()
        return self._arrays

    def fill_masks(self) -> None:
        """Of the rows last asked for, to which no token has been added since."""
        for mask, restriction in zip(self._masks, self._active, strict=False):
            restriction.fill(mask)

    def _add_masks(self) -> None:
        self._arrays.mask_rows = np.full(len(self._rows), -1, np.int32)
        for row, restriction in self._restricted:
            if restriction.active:
                self._arrays.mask_rows[row] = len(self._active)
                self._active.append(restriction)
        if len(self._active) > len(self._masks):
            self._masks = np.empty((len(self._active), self._masks.shape[1]), np.uint32)
        self._arrays.masks = self._masks[: len(self._active)].reshape(-1)

    def _add_histories(self, rows: Rows) -> None:
        for sequence, history in self._histories.items():
            history.read(sequence)
        parts = [self._histories.get(s, _NO_HISTORY) if s else _NO_HISTORY for s in rows]
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


def _fixed_arrays(rows: Rows) -> SamplingArrays:
    """Everything but the index, the histories and the masks."""
    params = [s.request.params if s else _NO_SAMPLING for s in rows]
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
        choice=np.array([s.request.choice if s else 0 for s in rows], np.uint32),
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
