"""Causal attention over the paged cache: one procedure for prefill and decode.

The result of a query row depends on nothing but its query, its position and the cached keys and
values it may see. Positions are divided into fixed partitions of PARTITION. Within a partition a
row's softmax is computed in one piece (largest score, weights, weighted sum of values in order of
position); partitions are then folded together in order. Whether one task walks all partitions
(prefill, short contexts) or several tasks take some each and the last to finish folds them (long
contexts with few rows) changes who computes a part, never how.

A tile is up to TILE_ROWS rows: the query heads that share one KV head, for one or more queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import CACHE_LINE
from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.kernels.kv import value_columns

PARTITION = 256  # positions, a multiple of the block size
TILE_ROWS = 48  # rows of a tile, unless a KV head has more query heads than that
ITEMS_PER_THREAD = 8  # a step's work is divided into about as many pieces
MOST_PARTS_BYTES = 32 << 20
SCORE_STRIDE = PARTITION + 16  # not a power of two, so that rows do not share cache sets
ADDRESS_BYTES = 8 * 2 * PARTITION // BLOCK_TOKENS  # of the blocks of this partition and the next


@dataclass(frozen=True)
class AttendArgs(Arguments):
    """Words of `attend`. q is [T, heads * key_dim], out [T, heads * value_dim].

    `kv_store` has to have finished with the step's own keys and values. `cache` is the group's
    array plus `layer_offset`.
    """

    q: int
    q_stride: int
    out: int
    out_stride: int
    cache: int
    block_bytes: int  # group_block_bytes
    head_bytes: int
    group: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    sinks: int  # float32 [heads], or 0
    scratch: int  # aligned to 64
    scratch_bytes: int  # per thread: `scratch_bytes(...)`
    parts: int  # aligned to 64, `parts_bytes(...)` bytes for all threads; zero at first
    parts_bytes: int


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of a full tile: whole queries, each with the query heads of one KV head."""
    per_query = heads // kv_heads
    return max(1, TILE_ROWS // per_query) * per_query


def scratch_bytes(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes that a thread needs; layers may share them."""
    row = key_dim + SCORE_STRIDE + 2 * part_stride(value_dim)
    return 4 * row * tile_rows(heads, kv_heads) + ADDRESS_BYTES


def part_stride(value_dim: int) -> int:
    """float32 entries of one row's part: weighted sum of values, largest score, sum of weights."""
    return value_columns(value_dim) + 16


def parts_bytes(nthreads: int, context: int, heads: int, kv_heads: int, value_dim: int) -> int:
    """Bytes for parts that several threads compute; layers may share them, the largest serves.

    What does not fit is computed by one thread. Only the memory that long contexts need is touched.
    """
    rows = ITEMS_PER_THREAD * nthreads * (heads // kv_heads) * -(-context // PARTITION)
    slots = min(rows * 4 * part_stride(value_dim), MOST_PARTS_BYTES)
    return ITEMS_PER_THREAD * nthreads * CACHE_LINE + slots
