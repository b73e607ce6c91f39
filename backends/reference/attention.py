"""Paged attention, one query row at a time: a row's sums depend on its position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array
from localllm.backends.program import Attention, FloatArray, KVLayer
from localllm.backends.reference.ops import softcap, softmax


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, [block, BLOCK_TOKENS, KV head, dimension]."""

    keys: FloatArray
    values: FloatArray

    @classmethod
    def empty(cls, layer: KVLayer, n_blocks: int) -> Self:
        """Zeros that take no memory until they are written."""
        shape = (n_blocks, BLOCK_TOKENS, layer.kv_heads)
        return cls(
            np.zeros((*shape, layer.key_dim), np.float32),
            np.zeros((*shape, layer.value_dim), np.float32),
        )

    def store(self, k: FloatArray, v: FloatArray, slots: Int32Array) -> None:
        blocks, entries = np.divmod(slots, BLOCK_TOKENS)
        self.keys[blocks, entries] = k.reshape(len(k), *self.keys.shape[2:])
        self.values[blocks, entries] = v.reshape(len(v), *self.values.shape[2:])


def attention(
    op: Attention,
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    sinks: FloatArray | None,
    cache: LayerCache,
    batch: Batch,
) -> FloatArray:
    cache.store(k, v, batch.slots[op.group])
    out = np.empty((len(q), op.out.width), np.float32)
    for s, (start, end) in enumerate(zip(batch.query_start, batch.query_start[1:], strict=False)):
        if start == end:
            continue
        positions = batch.positions[start:end]
        block = _first_visible(op, int(positions[0])) // BLOCK_TOKENS
        table = batch.block_tables[op.group, s, block : positions[-1] // BLOCK_TOKENS + 1]
        keys, values = _gather(cache.keys, table), _gather(cache.values, table)
        for row, position in zip(range(start, end), positions, strict=True):
            first = _first_visible(op, int(position)) - block * BLOCK_TOKENS
            seen = slice(first, int(position) + 1 - block * BLOCK_TOKENS)
            out[row] = _attend(op, q[row], keys[:, seen], values[:, seen], sinks)
    return out


def _first_visible(op: Attention, position: int) -> int:
    return 0 if op.window is None else max(0, position - op.window + 1)


def _gather(pages: FloatArray, table: Int32Array) -> FloatArray:
    """The table's blocks one after another, as [KV head, position, dimension]."""
    rows = pages[table].reshape(-1, *pages.shape[2:])
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def _attend(
    op: Attention, q: FloatArray, keys: FloatArray, values: FloatArray, sinks: FloatArray | None
) -> FloatArray:
    """One row's heads [heads * head_dim] over the positions that it sees."""
    kv_heads = len(keys)
    queries = q.reshape(kv_heads, -1, op.head_dim)  # the heads that share a KV head
    scores = queries @ keys.transpose(0, 2, 1) * np.float32(op.scale)
    if op.softcap is not None:
        scores = softcap(scores, op.softcap)
    if sinks is not None:  # a column that takes part in the softmax but has no value
        scores = np.concatenate([scores, sinks.reshape(kv_heads, -1, 1)], axis=-1)
    weights = softmax(scores)[..., : keys.shape[1]]
    return (np.ascontiguousarray(weights) @ values).reshape(-1)
