"""Paged attention: tiles of query rows over partitions of the positions, in torch operations.

Rows of one sequence go in tiles of `TILE_ROWS`, positions in partitions of `PARTITION` that start
at its multiples. Every product has the same shape whatever the batch. A row folds its partitions in
rising order, and a partition in which it sees nothing changes no bit of it, so that its result does
not depend on which rows share its tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.backends.base import BLOCK_TOKENS, Batch
from localllm.backends.program import Attention, KVGroup
from localllm.backends.torch_common.arithmetic import elementwise, ordered_sum
from localllm.backends.torch_common.kv_cache import LayerCache, Rows
from localllm.backends.torch_common.ops import softcap
from localllm.backends.torch_common.target import Target

TILE_ROWS = 16
PARTITION = 256
MOST_TILES = 32  # whose keys and values are gathered at once

_NOWHERE = -1  # the position of rows that fill a tile up
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Some tiles over one partition; None stands for all tiles."""

    tiles: Tensor | None
    slots: Tensor  # [tiles * PARTITION], slot 0 where no row of the tile sees anything
    known: Tensor  # [tiles, PARTITION, 1, 1]: whether slots are those of the sequence
    visible: Tensor  # [tiles, 1, TILE_ROWS, 1, PARTITION]


@dataclass(frozen=True)
class Plan:
    """What the layers of one KV group do in one step."""

    slots: Tensor  # [T], to store to
    n_tiles: int
    places: Tensor  # [T]: row of the tiles, seen as one matrix, that a token has
    pieces: list[Piece]


def plan(target: Target, group: KVGroup, index: int, batch: Batch) -> Plan:
    """For KV group number `index`."""
    places, sequences, positions = _tiles(batch)
    begins, ends = np.zeros(len(positions), np.int64), positions.max(1)
    if group.window is not None:  # the first row of a tile is there and looks back farthest
        begins = np.maximum(positions[:, 0] - group.window + 1, 0)
    tables = batch.block_tables[index]
    pieces = []
    for partition in range(begins.min() // PARTITION, ends.max() // PARTITION + 1):
        active = (begins // PARTITION <= partition) & (partition <= ends // PARTITION)
        for tiles in _runs(np.flatnonzero(active), MOST_TILES):
            at = partition * PARTITION + np.arange(PARTITION)
            known = (begins[tiles, None] <= at) & (at <= ends[tiles, None])
            blocks = np.minimum(at // BLOCK_TOKENS, tables.shape[1] - 1)
            slots = tables[sequences[tiles]][:, blocks] * BLOCK_TOKENS + at % BLOCK_TOKENS
            rows = positions[tiles][:, None, :, None, None]
            visible = at <= rows
            if group.window is not None:
                visible &= at > rows - group.window
            every = len(tiles) == len(positions)
            pieces.append(
                Piece(
                    None if every else _sent(target, tiles),
                    _sent(target, np.where(known, slots, 0).flatten()),
                    _sent(target, known[..., None, None]),
                    _sent(target, visible),
                )
            )
    stored = batch.slots[index].astype(np.int64)
    return Plan(_sent(target, stored), len(positions), _sent(target, places), pieces)


def attention(
    op: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cache: LayerCache, p: Plan
) -> Tensor:
    cache.keys.store(k, p.slots)
    cache.values.store(v, p.slots)
    tiled = q.new_zeros(p.n_tiles * TILE_ROWS, q.shape[1])
    tiled[p.places] = q
    # [tile, KV head, row, query head that shares it, dimension]
    queries = tiled.view(p.n_tiles, TILE_ROWS, cache.kv_heads, -1, op.head_dim).transpose(1, 2)
    state = _State.start(queries, op.value_dim, sinks)
    for piece in p.pieces:
        keys = _gathered(cache.keys, piece)
        # What is not of the sequence may be anything, and even nothing times NaN is NaN.
        values = torch.where(piece.known, _gathered(cache.values, piece), 0.0)
        state.fold(op, _some(queries, piece.tiles), keys, values, piece)
    out = state.total / state.weight[..., None]
    return out.transpose(1, 2).reshape(-1, op.out.width).index_select(0, p.places)


@dataclass
class _State:
    """Of each query row and head: its largest score, and sums relative to it."""

    largest: Tensor
    weight: Tensor
    total: Tensor

    @classmethod
    def start(cls, queries: Tensor, value_dim: int, sinks: Tensor | None) -> _State:
        """A sink is a score with no value."""
        shape = queries.shape[:-1]
        total = queries.new_zeros(*shape, value_dim)
        if sinks is None:
            return cls(queries.new_full(shape, -torch.inf), queries.new_zeros(shape), total)
        largest = sinks.view(shape[1], 1, shape[3]).expand(shape).contiguous()
        return cls(largest, queries.new_ones(shape), total)

    def fold(
        self, op: Attention, queries: Tensor, keys: Tensor, values: Tensor, piece: Piece
    ) -> None:
        scores = _product(queries, keys.permute(0, 2, 1, 3), transposed=True) * op.scale
        if op.softcap is not None:
            scores = softcap(scores, op.softcap)
        scores = scores.masked_fill(~piece.visible, -torch.inf)
        before = _some(self.largest, piece.tiles)
        largest = torch.maximum(before, scores.amax(-1))
        base = torch.where(largest == -torch.inf, 0.0, largest)
        weights = elementwise(torch.exp, scores - base[..., None])
        shrink = elementwise(torch.exp, before - base)
        added = _product(weights, values.permute(0, 2, 1, 3), transposed=False)
        weight = _some(self.weight, piece.tiles) * shrink + ordered_sum(weights)
        total = _some(self.total, piece.tiles) * shrink[..., None] + added
        if piece.tiles is None:
            self.largest, self.weight, self.total = largest, weight, total
        else:
            self.largest[piece.tiles] = largest
            self.weight[piece.tiles] = weight
            self.total[piece.tiles] = total


def _product(rows: Tensor, matrix: Tensor, *, transposed: bool) -> Tensor:
    """[n, h, tile row, head, k] times [n, h, k, m] (or [n, h, m, k], transposed)."""
    flat = rows.reshape(-1, rows.shape[2] * rows.shape[3], rows.shape[4])
    other = matrix.reshape(-1, *matrix.shape[2:])
    return torch.bmm(flat, other.mT if transposed else other).view(*rows.shape[:-1], -1)


def _some(x: Tensor, tiles: Tensor | None) -> Tensor:
    return x if tiles is None else x.index_select(0, tiles)


def _gathered(cache: Rows, piece: Piece) -> Tensor:
    """[tile, position, KV head, dimension] in float32."""
    rows = cache.gather(piece.slots)
    return rows.view(-1, PARTITION, *rows.shape[1:])


def _tiles(batch: Batch) -> tuple[_Indices, _Indices, _Indices]:
    """Place of each token in the tiles; of each tile its sequence and positions [TILE_ROWS]."""
    counts = np.diff(batch.query_start).astype(np.int64)
    per_sequence = -(-counts // TILE_ROWS)
    firsts = np.concatenate([[0], np.cumsum(per_sequence)])
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owners)) - batch.query_start[owners]
    places = firsts[owners] * TILE_ROWS + within
    positions = np.full(firsts[-1] * TILE_ROWS, _NOWHERE, np.int64)
    positions[places] = batch.positions
    sequences = np.repeat(np.arange(len(counts)), per_sequence)
    return places, sequences, positions.reshape(-1, TILE_ROWS)


def _runs(tiles: _Indices, most: int) -> Iterator[_Indices]:
    for start in range(0, len(tiles), most):
        yield tiles[start : start + most]


def _sent(target: Target, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(target.device)
