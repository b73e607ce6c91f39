"""A step's inputs on the device: those of the forward pass, and those of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, SamplingArrays, StepLimits
from localllm.backends.cpu.batch_check import PER_ROW
from localllm.backends.cuda.kernels.attention import query_tiles
from localllm.backends.cuda.kernels.sampling import DeviceSampling
from localllm.backends.cuda.shapes import StepShape
from localllm.backends.cuda.staging import Piece, Staging, padded

_INT = np.dtype(np.int32)
_GREEDY = SamplingArrays.greedy(1)
_STARTS = ("bias_start", "history_start")
_LISTS = ("bias_ids", "bias_values", "history_ids", "history_counts")
_LIST_WORDS = 1 << 20  # of penalties and biases that travel with the rest


@dataclass(frozen=True)
class Forward:
    """What the ops read. Tiles are those of `query_tiles`, by query heads per KV head."""

    shape: StepShape
    ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    slots: Sequence[Tensor]  # [T] of each KV group
    tables: Sequence[Tensor]  # [S, blocks] of each KV group
    tiles: dict[int, Tensor]


class Inputs:
    """The arrays of one shape, at addresses that depend on the shape alone.

    `spare_blocks` are those of each KV group that no sequence has: rows that fill a shape up are
    sequences of one token each, which lies there.
    """

    def __init__(
        self,
        staging: Staging,
        shape: StepShape,
        n_tiles: dict[int, int],
        spare_blocks: Sequence[int],
    ) -> None:
        self._staging, self.shape, self._spare = staging, shape, spare_blocks
        self._at = 0
        tokens, groups = shape.tokens, len(spare_blocks)
        self._ids = self._take(tokens)
        self._positions = self._take(tokens)
        self._logit_rows = self._take(shape.rows)
        self._slots = [self._take(tokens) for _ in range(groups)]
        self._tables = [self._take(shape.seqs, shape.table) for _ in range(groups)]
        self._tiles = {ratio: self._take(n, 3) for ratio, n in n_tiles.items()}
        self._rows = {
            name: self._take(shape.rows, dtype=getattr(_GREEDY, name).dtype) for name in PER_ROW
        }
        self._starts = {name: self._take(shape.rows + 1) for name in _STARTS}
        self._arrays: dict[str, Any] = {
            name: piece.device for name, piece in (self._rows | self._starts).items()
        }
        self._arrays |= dict.fromkeys((*_LISTS, "masks"), self._ids.device[:0])
        self._without_lists: dict[tuple[object, ...], DeviceSampling] = {}
        starts = np.arange(shape.seqs + 1, dtype=np.int32)
        one_each = shape.tokens == shape.seqs
        self._tiles_of_one_each = query_tiles(starts, 1, 1) if one_each else None
        self.forward = Forward(
            shape,
            self._ids.device,
            self._positions.device,
            self._logit_rows.device,
            [piece.device for piece in self._slots],
            [piece.device for piece in self._tables],
            {ratio: piece.device for ratio, piece in self._tiles.items()},
        )

    def send(self, batch: Batch) -> DeviceSampling:
        """Fills the arrays with the batch; the masks of its sampling are still to come."""
        self._staging.wait()
        self._fill(batch)
        sampling, end = self._fill_sampling(batch.sampling)
        self._staging.send(end)
        return sampling

    def _take(self, *shape: int, dtype: np.dtype[np.generic] = _INT) -> Piece:
        piece, self._at = self._staging.take(self._at, shape, dtype)
        return piece

    def _fill(self, batch: Batch) -> None:
        tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
        for piece, array, size in (
            (self._ids, batch.ids, tokens),
            (self._positions, batch.positions, tokens),
            (self._logit_rows, batch.logit_rows, rows),
        ):
            piece.host[:size] = array
            piece.host[size:] = 0
        width = min(self.shape.table, batch.block_tables.shape[2])
        for g, spare in enumerate(self._spare):
            slots, table = self._slots[g].host, self._tables[g].host
            slots[:tokens] = batch.slots[g]
            slots[tokens:] = spare * BLOCK_TOKENS
            table[:seqs, :width] = batch.block_tables[g, :, :width]
            table[seqs:, 0] = spare
        for ratio, piece in self._tiles.items():
            tiles = self._tiles_of_one_each
            piece.host[...] = query_tiles(batch.query_start, ratio, 1) if tiles is None else tiles

    def _fill_sampling(self, sampling: SamplingArrays) -> tuple[DeviceSampling, int]:
        rows, at = sampling.temperature.size, self._at
        for name, piece in self._rows.items():
            piece.host[:rows] = getattr(sampling, name)
            if rows < self.shape.rows:
                piece.host[rows:] = getattr(_GREEDY, name)[0]
        for name, piece in self._starts.items():
            starts = getattr(sampling, name)
            piece.host[: rows + 1] = starts
            piece.host[rows + 1 :] = starts[-1]
        known, lists = DeviceSampling.known(sampling), {}
        for name in _LISTS:
            array = getattr(sampling, name)
            if array.size:
                lists[name], at = self._staging.put(at, array)
        if lists:
            return DeviceSampling(**self._arrays | lists, **known), at
        rules = tuple(known.values())
        if rules not in self._without_lists:  # which have the same arrays in every step
            self._without_lists[rules] = DeviceSampling(**self._arrays, **known)
        return self._without_lists[rules], at


def tile_counts(query_start: Int32Array, ratios: set[int]) -> dict[int, int]:
    return {ratio: len(query_tiles(query_start, ratio, 1)) for ratio in ratios}


def staging_words(limits: StepLimits, groups: int, most_context: int, ratios: set[int]) -> int:
    """Room for the largest step, and for what a few thousand penalties list."""
    largest = StepShape(limits.tokens, limits.seqs, limits.logit_rows, most_context)
    tables = groups * padded(largest.seqs * largest.table)
    tokens = (2 + groups) * padded(largest.tokens)
    tiles = len(ratios) * padded(3 * (largest.tokens + largest.seqs))
    rows = (len(PER_ROW) + 4) * padded(2 * largest.rows + 2)
    return tables + tokens + tiles + rows + _LIST_WORDS
