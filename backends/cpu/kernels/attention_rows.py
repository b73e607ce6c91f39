"""Attention of one tile of rows over one partition of positions, and the folding of partitions.

A tile's rows are numbered query by query, each with the query heads of one KV head. Scores are
powers of two: log2(e) is part of the scale. Positions inside a partition count from its start.

A row's part is `part_stride` float32 words: the sum of weighted values [value columns], the
largest score, the sum of weights, and (as int32) the range of positions that the row sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.kernels.attention_tiles import (
    add_outer,
    load_tile,
    store_tile,
    zeros_1,
    zeros_2,
    zeros_3,
    zeros_4,
    zeros_6,
)
from localllm.backends.cpu.kernels.kv import VALUE_COLUMNS
from localllm.backends.cpu.simd import (
    as_f32x8,
    as_i32x8,
    broadcast_f32x8,
    f16_to_f32,
    fma,
    i32_to_f32,
    lanes_below,
    load_f16x8,
    load_f32x8,
    load_masked_f32x8,
    max_f32,
    maximum,
    prefetch,
    round_to_i32,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f32,
    scalar_store_i32,
    scalar_store_i64,
    select,
    shift_left,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
    sum_f32,
    vexp,
)

PARTITION = 256  # positions, a multiple of the block size
SCORE_BYTES = 4 * (PARTITION + 16)  # of a row; no power of two, lest rows share cache sets
_LOG2_E = 1.4426950408889634
_F16_ROW = 2 * BLOCK_TOKENS  # bytes of one dimension of a block's keys


class Tile(NamedTuple):
    """Rows to compute and where their data is; all addresses and sizes in bytes."""

    rows: int
    rows_per_query: int
    position: int  # of the first query
    window: int  # or more than any position
    softcap: float  # or 0
    q: int  # float32 [rows, key_dim], scaled
    key_dim: int
    value_columns: int
    scores: int  # float32 [rows], SCORE_BYTES each
    blocks: int  # int64 [PARTITION / BLOCK_TOKENS + 1], addresses of a partition's blocks
    table: int  # int32, the sequence's blocks
    table_blocks: int  # blocks that the last query reaches
    cache: int  # of the KV head in block 0
    block_bytes: int


@helper
def part_bytes(columns: int) -> int:
    return 4 * (columns + 16)


@helper
def compute_part(tile: Tile, part: int, to: int) -> None:
    """Parts of all rows for partition `part`, one after the other at `to`."""
    base = part * PARTITION
    columns, step = tile.value_columns, part_bytes(tile.value_columns)
    for row in range(tile.rows):
        position = tile.position - base + row // tile.rows_per_query
        at = to + row * step + columns * 4
        scalar_store_i32(at, 8, max(0, position - tile.window + 1))
        scalar_store_i32(at, 12, min(PARTITION, position + 1))
    first = scalar_load_i32(to + columns * 4, 8)
    last = scalar_load_i32(to + (tile.rows - 1) * step + columns * 4, 12)
    _find_blocks(tile, base, first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))
    for block in range(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS)):
        _score_block(tile, base, block)
    for row in range(tile.rows):
        _weigh(tile, tile.scores + row * SCORE_BYTES, to + row * step)
    for column in range(0, columns, VALUE_COLUMNS):
        _sum_values(tile, column, to)


@helper
def _find_blocks(tile: Tile, base: int, first: int, last: int) -> None:
    """Addresses of blocks first..last of the partition, and of one more to fetch ahead."""
    for block in range(first, last + 1):
        index = min(base // BLOCK_TOKENS + block, tile.table_blocks - 1)
        number = scalar_load_i32(tile.table, index * 4)
        scalar_store_i64(tile.blocks, block * 8, tile.cache + number * tile.block_bytes)


@helper
def _score_block(tile: Tile, base: int, block: int) -> None:
    """Scores of the rows that see some of the block."""
    start = base + block * BLOCK_TOKENS
    per_query = tile.rows_per_query
    row = max(0, start - tile.position) * per_query
    end = min(tile.rows, (start + BLOCK_TOKENS - 1 + tile.window - tile.position) * per_query)
    keys = scalar_load_i64(tile.blocks, block * 8)
    ahead = scalar_load_i64(tile.blocks, block * 8 + 8)
    scores = tile.scores + block * BLOCK_TOKENS * 4
    while row < end:
        q, to, left = tile.q + row * tile.key_dim * 4, scores + row * SCORE_BYTES, end - row
        if left >= 6:
            _score_rows(zeros_6(), keys, tile.key_dim, q, to, ahead)
            row += 6
        elif left >= 4:
            _score_rows(zeros_4(), keys, tile.key_dim, q, to, ahead)
            row += 4
        elif left == 3:
            _score_rows(zeros_3(), keys, tile.key_dim, q, to, ahead)
            row += 3
        elif left == 2:
            _score_rows(zeros_2(), keys, tile.key_dim, q, to, ahead)
            row += 2
        else:
            _score_rows(zeros_1(), keys, tile.key_dim, q, to, ahead)
            row += 1
        ahead = keys


@helper
def _score_rows(sums: Any, keys: int, key_dim: int, q: int, to: int, ahead: int) -> None:
    for d in range(key_dim):
        prefetch(ahead, d * 64)
        low = f16_to_f32(load_f16x8(keys, d * _F16_ROW))
        high = f16_to_f32(load_f16x8(keys, d * _F16_ROW + 16))
        sums = add_outer(sums, low, high, q + d * 4, key_dim * 4)
    store_tile(sums, to, SCORE_BYTES)


@helper
def _weigh(tile: Tile, scores: int, part: int) -> None:
    """Turns a row's scores into weights relative to its largest; zeroes its sum of values."""
    state = part + tile.value_columns * 4
    low, high = scalar_load_i32(state, 8), scalar_load_i32(state, 12)
    for column in range(0, tile.value_columns, 8):
        store_f32x8(part, column * 4, splat_f32x8(0.0))
    if low >= high:
        return
    first, last = low // 8 * 8, -(-high // 8) * 8
    if tile.softcap != 0:
        for i in range(first, last, 8):
            capped = _tanh(load_f32x8(scores, i * 4)) * splat_f32x8(tile.softcap * _LOG2_E)
            store_f32x8(scores, i * 4, capped)
    # Positions that the row does not see weigh exactly 0.
    unseen = splat_f32x8(-np.inf)
    seen = select(lanes_below(low - first), unseen, load_f32x8(scores, first * 4))
    store_f32x8(scores, first * 4, seen)
    seen = select(lanes_below(high - last + 8), load_f32x8(scores, (last - 8) * 4), unseen)
    store_f32x8(scores, (last - 8) * 4, seen)
    top, top_2 = unseen, unseen
    for i in range(first, last - 8, 16):
        top = maximum(load_f32x8(scores, i * 4), top)
        top_2 = maximum(load_f32x8(scores, i * 4 + 32), top_2)
    top = maximum(load_f32x8(scores, (last - 8) * 4), top)
    largest = max_f32(maximum(top, top_2))
    total = splat_f32x8(0.0)
    for i in range(first, last, 8):
        weight = _exp2(load_f32x8(scores, i * 4) - splat_f32x8(largest))
        store_f32x8(scores, i * 4, weight)
        total = total + weight
    scalar_store_f32(state, 0, largest)
    scalar_store_f32(state, 4, sum_f32(total))


@helper
def _sum_values(tile: Tile, column: int, to: int) -> None:
    """Adds the weighted values of 16 columns to all rows' parts."""
    step = part_bytes(tile.value_columns)
    part, scores = to, tile.scores
    left = tile.rows
    while left > 0:
        if left >= 6:
            _sum_rows(zeros_6(), 6, tile, column, part, scores)
            taken = 6
        elif left >= 4:
            _sum_rows(zeros_4(), 4, tile, column, part, scores)
            taken = 4
        elif left == 3:
            _sum_rows(zeros_3(), 3, tile, column, part, scores)
            taken = 3
        elif left == 2:
            _sum_rows(zeros_2(), 2, tile, column, part, scores)
            taken = 2
        else:
            _sum_rows(zeros_1(), 1, tile, column, part, scores)
            taken = 1
        part += taken * step
        scores += taken * SCORE_BYTES
        left -= taken


@helper
def _sum_rows(tile_of: Any, rows: int, tile: Tile, column: int, part: int, scores: int) -> None:
    """The positions that all rows see go together; before and after those, row by row."""
    step, state = part_bytes(tile.value_columns), tile.value_columns * 4
    low = scalar_load_i32(part + (rows - 1) * step + state, 8)
    high = scalar_load_i32(part + state, 12)
    if low >= high:
        low = high = PARTITION
    for row in range(rows):
        at, weights = part + row * step, scores + row * SCORE_BYTES
        first, last = scalar_load_i32(at + state, 8), scalar_load_i32(at + state, 12)
        _add_values(zeros_1(), tile, column, at, weights, first, min(low, last))
    _add_values(tile_of, tile, column, part, scores, low, high)
    for row in range(rows):
        at, weights = part + row * step, scores + row * SCORE_BYTES
        last = scalar_load_i32(at + state, 12)
        _add_values(zeros_1(), tile, column, at, weights, high, last)


@helper
def _add_values(
    like: Any, tile: Tile, column: int, part: int, weights: int, first: int, last: int
) -> None:
    if first >= last:
        return
    step = part_bytes(tile.value_columns)
    offset = tile.key_dim * _F16_ROW + column * 2
    sums = load_tile(like, part + column * 4, step)
    for t in range(first, last):
        block = scalar_load_i64(tile.blocks, (t >> 4) * 8)
        values = block + (t & 15) * tile.value_columns * 2
        low = f16_to_f32(load_f16x8(values, offset))
        high = f16_to_f32(load_f16x8(values, offset + 16))
        sums = add_outer(sums, low, high, weights + t * 4, SCORE_BYTES)
    store_tile(sums, part + column * 4, step)


@helper
def fold_part(total: int, part: int, columns: int) -> None:
    """Adds a row's part to its total; both are laid out as parts."""
    if scalar_load_i32(part, columns * 4 + 8) >= scalar_load_i32(part, columns * 4 + 12):
        return
    before, here = broadcast_f32x8(total, columns * 4), broadcast_f32x8(part, columns * 4)
    largest = maximum(before, here)
    rescale, scale = _exp2(before - largest), _exp2(here - largest)
    for i in range(0, columns, 8):
        kept = load_f32x8(total, i * 4) * rescale
        store_f32x8(total, i * 4, fma(load_f32x8(part, i * 4), scale, kept))
    weights = broadcast_f32x8(total, columns * 4 + 4) * rescale
    weights = fma(broadcast_f32x8(part, columns * 4 + 4), scale, weights)
    _store_state(total, columns, largest, weights)


@helper
def clear_total(total: int, columns: int) -> None:
    for i in range(0, columns, 8):
        store_f32x8(total, i * 4, splat_f32x8(0.0))
    _store_state(total, columns, splat_f32x8(-np.inf), splat_f32x8(0.0))


@helper
def add_sink(total: int, columns: int, sink: float) -> None:
    """A logit that joins the softmax without a value."""
    before, here = broadcast_f32x8(total, columns * 4), splat_f32x8(sink * _LOG2_E)
    largest = maximum(before, here)
    rescale = _exp2(before - largest)
    for i in range(0, columns, 8):
        store_f32x8(total, i * 4, load_f32x8(total, i * 4) * rescale)
    weights = broadcast_f32x8(total, columns * 4 + 4)
    _store_state(total, columns, largest, fma(weights, rescale, _exp2(here - largest)))


@helper
def write_row(total: int, columns: int, out: int, value_dim: int) -> None:
    weights = broadcast_f32x8(total, columns * 4 + 4)
    for i in range(0, value_dim, 8):
        result = load_f32x8(total, i * 4) / weights
        store_masked_f32x8(out, i * 4, result, lanes_below(value_dim - i))


@helper
def load_query(q: int, key_dim: int, scale: float, softcap: float, to: int) -> None:
    """A query times what turns its scores into powers of two, or into tanh's argument."""
    factor = splat_f32x8(scale / softcap if softcap != 0 else scale * _LOG2_E)
    for i in range(0, key_dim, 8):
        mask = lanes_below(key_dim - i)
        store_masked_f32x8(to, i * 4, load_masked_f32x8(q, i * 4, mask) * factor, mask)


@helper
def _store_state(part: int, columns: int, largest: Any, weights: Any) -> None:
    one = lanes_below(1)
    store_masked_f32x8(part, columns * 4, largest, one)
    store_masked_f32x8(part, columns * 4 + 4, weights, one)


@helper
def _exp2(x: Any) -> Any:
    """2**x within 1e-7 relative for x <= 0; 0 below -126, NaN of NaN."""
    x = maximum(splat_f32x8(-127.0), x)
    n = round_to_i32(x)
    f = x - i32_to_f32(n)
    # 2**f on +-0.5, fitted for least relative error (2e-9)
    p = fma(f, splat_f32x8(0.00015353361959569156), splat_f32x8(0.0013398875016719103))
    p = fma(p, f, splat_f32x8(0.00961843691766262))
    p = fma(p, f, splat_f32x8(0.055503323674201965))
    p = fma(p, f, splat_f32x8(0.24022647738456726))
    p = fma(p, f, splat_f32x8(0.6931471824645996))
    p = fma(p, f, splat_f32x8(1.0))
    scaled = as_f32x8(as_i32x8(p) + shift_left(n, 23))
    return select(x < splat_f32x8(-126.0), splat_f32x8(0.0), scaled)


@helper
def _tanh(x: Any) -> Any:
    return splat_f32x8(1.0) - splat_f32x8(2.0) / (vexp(x + x) + splat_f32x8(1.0))
