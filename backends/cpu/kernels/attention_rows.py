"""Attention of one tile of rows over one partition of positions, and the folding of partitions.

A tile's rows are numbered query by query, each with the query heads of one KV head. Scores are
powers of two: log2(e) is part of the scale. Positions inside a partition count from its start.

A row's part has `Tile.part_bytes`: the float32 sum of weighted values [value columns], then its
state: the largest score and the sum of weights (float32), and the range of positions that the row
sees (int64).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import helper, inlined
from localllm.backends.cpu.kernels.attention_tiles import (
    MOST_ROWS,
    PARTITION,
    PARTITION_BLOCKS,
    SCORE_BYTES,
    TILE_LANES,
    add_values_f16,
    add_values_f32,
    score_rows_f16,
    score_rows_f32,
)
from localllm.backends.cpu.kernels.kv import F16_BYTES, VALUE_COLUMNS
from localllm.backends.cpu.simd import (
    as_f32x8,
    as_i32x8,
    atomic_add,
    broadcast_f32x8,
    extract,
    f16_to_f32,
    fma,
    i32_to_f32,
    lanes_below,
    load_f16x8,
    load_f32x8,
    load_masked_f32x8,
    max_f32,
    maximum,
    round_to_i32,
    scalar_load_f32,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f32,
    scalar_store_i64,
    select,
    shift_left,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
    store_release,
    sum_f32,
    vexp,
)

STATE_BYTES = 64
WIDEN_ABOVE = 2 * MOST_ROWS  # rows of a tile that make it worth to widen keys and values once
_LARGEST, _WEIGHTS, _LOW, _HIGH = 0, 4, 8, 16  # offsets in a row's state
_LOG2_E = 1.4426950408889634


class Span(NamedTuple):
    """Some neighbouring queries of one sequence, and the partitions that they see."""

    seq: int
    token: int  # the first query's row of q and out
    queries: int  # 0 or less: the sequence has no such tile
    rows_per_query: int
    position: int  # of the first query
    window: int  # larger than any position: none
    first: int  # partition
    end: int


class Tile(NamedTuple):
    """Rows of one KV head and where their data is; all addresses, and sizes named _bytes."""

    rows: int
    rows_per_query: int
    position: int  # of the first query
    window: int  # larger than any position: none
    softcap: float  # 0: none
    sinks: int  # float32 [rows_per_query], or 0
    out: int  # the first row's output; queries are out_bytes apart, heads value_dim
    out_bytes: int
    key_dim: int
    value_dim: int
    part_bytes: int
    blocks: int  # int64 [2 * PARTITION_BLOCKS], of a partition and of the next one
    parts: int  # [rows]
    totals: int  # parts of all partitions so far [rows]
    scores: int  # float32 [rows], SCORE_BYTES each
    q: int  # float32 [rows, key_dim], scaled
    widened: int  # float32, a block's keys or 16 columns of a partition's values
    widened_blocks: int  # int64 [2 * PARTITION_BLOCKS], of such values
    table: int  # int32, the sequence's blocks
    table_blocks: int  # blocks that the last query reaches
    cache: int  # of the KV head in block 0
    block_bytes: int


@helper
def load_queries(tile: Tile, q: int, q_bytes: int, scale: float) -> None:
    """Fills tile.q with what turns scores into powers of two, or into the softcap's argument."""
    factor = splat_f32x8(scale / tile.softcap if tile.softcap != 0 else scale * _LOG2_E)
    width = tile.rows_per_query * tile.key_dim
    for query in range(tile.rows // tile.rows_per_query):
        source, to = q + query * q_bytes, tile.q + query * width * 4
        for i in range(0, width, 8):
            mask = lanes_below(width - i)
            store_masked_f32x8(to, i * 4, load_masked_f32x8(source, i * 4, mask) * factor, mask)


@inlined
def attend_tile(tile: Tile, span: Span, skip: int, count: int, shared: int, done: int) -> None:
    """Computes `count` partitions of a span, after `skip` others, and the output if it can.

    It can if these are all, or if the other pieces have finished: the parts of a divided span lie
    one after the other in `shared`, and `done` counts them. `shared` is 0 for an undivided one.
    """
    step = tile.rows * tile.part_bytes
    _clear_totals(tile)
    for i in range(skip, skip + count):
        to = tile.parts if shared == 0 else shared + i * step
        _compute_part(tile, span.first + i, span.first + skip + count, to)
        if shared == 0:
            _fold_part(tile, to)
    if shared != 0:
        n_parts = span.end - span.first
        if atomic_add(done, 0, count) + count < n_parts:
            return
        store_release(done, 0, 0)  # for the next layer
        for i in range(n_parts):
            _fold_part(tile, shared + i * step)
    _write_rows(tile)


@inlined
def _compute_part(tile: Tile, part: int, end_part: int, to: int) -> None:
    """Parts of all rows for partition `part`, one after the other at `to`.

    Memory is read without pause: with a block's keys its values are fetched, with a partition's
    values the keys of the next one (if it comes before `end_part`).
    """
    base = part * PARTITION
    for row in range(tile.rows):
        position = tile.position - base + row // tile.rows_per_query
        state = to + (row + 1) * tile.part_bytes - STATE_BYTES
        scalar_store_i64(state, _LOW, max(0, position - tile.window + 1))
        scalar_store_i64(state, _HIGH, min(PARTITION, position + 1))
    reach = tile.position - base + tile.rows // tile.rows_per_query
    first = max(0, tile.position - base - tile.window + 1) // BLOCK_TOKENS
    end = (min(PARTITION, reach) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    last = min(tile.table_blocks, end_part * PARTITION_BLOCKS) - 1
    for block in range(first, 2 * PARTITION_BLOCKS):
        index = min(part * PARTITION_BLOCKS + block, last)
        number = scalar_load_i32(tile.table, index * 4)
        scalar_store_i64(tile.blocks, block * 8, tile.cache + number * tile.block_bytes)
    for block in range(first, end):
        _score_block(tile, base, block)
    for row in range(tile.rows):
        _weigh(tile, tile.scores + row * SCORE_BYTES, to + row * tile.part_bytes)
    for at in range(0, tile.part_bytes - STATE_BYTES, VALUE_COLUMNS * 4):
        _sum_values(tile, at, to)


@helper
def _score_block(tile: Tile, base: int, block: int) -> None:
    """Scores of the rows that see some of the block."""
    start = base + block * BLOCK_TOKENS
    per_query = tile.rows_per_query
    row = max(0, start - tile.position) * per_query
    end = min(tile.rows, (start + BLOCK_TOKENS - 1 + tile.window - tile.position) * per_query)
    keys = scalar_load_i64(tile.blocks, block * 8)
    values = keys + tile.key_dim * BLOCK_TOKENS * F16_BYTES
    if tile.rows > WIDEN_ABOVE:
        for d in range(tile.key_dim):
            _widen(keys + d * 2 * TILE_LANES, tile.widened + d * 4 * TILE_LANES)
    step = _tile_height(end - row)
    for r in range(row, end, step):
        height = min(step, end - r)
        q = tile.q + r * tile.key_dim * 4
        to = tile.scores + r * SCORE_BYTES + block * BLOCK_TOKENS * 4
        if tile.rows > WIDEN_ABOVE:
            score_rows_f32(height, tile.widened, tile.key_dim, q, to, values)
        else:
            score_rows_f16(height, keys, tile.key_dim, q, to, values)


@helper
def _tile_height(rows: int) -> int:
    """Rows of a register tile, so that all are about as high."""
    tiles = max(1, (rows + MOST_ROWS - 1) // MOST_ROWS)
    return (rows + tiles - 1) // tiles


@helper
def _widen(source: int, to: int) -> None:
    """16 float16 to float32."""
    store_f32x8(to, 0, f16_to_f32(load_f16x8(source, 0)))
    store_f32x8(to, 32, f16_to_f32(load_f16x8(source, 16)))


@helper
def _weigh(tile: Tile, scores: int, part: int) -> None:
    """Turns a row's scores into weights relative to its largest; zeroes its sum of values."""
    state = part + tile.part_bytes - STATE_BYTES
    low, high = scalar_load_i64(state, _LOW), scalar_load_i64(state, _HIGH)
    for at in range(part, state, 32):
        store_f32x8(at, 0, splat_f32x8(0.0))
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
    scalar_store_f32(state, _LARGEST, largest)
    scalar_store_f32(state, _WEIGHTS, sum_f32(total))


@helper
def _sum_values(tile: Tile, column_bytes: int, to: int) -> None:
    """Adds the weighted values of 16 columns to all rows' parts.

    The positions that all rows of a register tile see go together; those before and after them
    row by row, so that nothing of a position that a row does not see enters its sum.
    """
    if tile.rows > WIDEN_ABOVE:
        _widen_values(tile, column_bytes, to)
    step = _tile_height(tile.rows)
    for row in range(0, tile.rows, step):
        end = min(tile.rows, row + step)
        state = to + (row + 1) * tile.part_bytes - STATE_BYTES
        low = scalar_load_i64(state + (end - 1 - row) * tile.part_bytes, _LOW)
        high = scalar_load_i64(state, _HIGH)
        if low >= high:
            low = high = PARTITION
        for r in range(row, end):
            first = scalar_load_i64(state + (r - row) * tile.part_bytes, _LOW)
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, _HIGH)
            _add_values(tile, r, r + 1, column_bytes, to, first, min(low, last))
        _add_values(tile, row, end, column_bytes, to, low, high)
        for r in range(row, end):
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, _HIGH)
            _add_values(tile, r, r + 1, column_bytes, to, high, last)


@helper
def _widen_values(tile: Tile, column_bytes: int, to: int) -> None:
    """16 columns of the values that the rows see, as float32."""
    state = to + tile.part_bytes - STATE_BYTES
    first = scalar_load_i64(state, _LOW) // BLOCK_TOKENS
    last = scalar_load_i64(state + (tile.rows - 1) * tile.part_bytes, _HIGH)
    value_bytes = (tile.part_bytes - STATE_BYTES) // 2
    for block in range(first, (last + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
        values = scalar_load_i64(tile.blocks, block * 8) + column_bytes // 2
        values += tile.key_dim * BLOCK_TOKENS * F16_BYTES
        widened = tile.widened + block * BLOCK_TOKENS * 4 * TILE_LANES
        scalar_store_i64(tile.widened_blocks, block * 8, widened)
        for t in range(BLOCK_TOKENS):
            _widen(values + t * value_bytes, widened + t * 4 * TILE_LANES)


@helper
def _add_values(
    tile: Tile, row: int, end: int, column_bytes: int, to: int, first: int, last: int
) -> None:
    """Positions first..last of rows row..end."""
    if first >= last:
        return
    sums = to + row * tile.part_bytes + column_bytes
    weights = tile.scores + row * SCORE_BYTES
    step, value_bytes = tile.part_bytes, (tile.part_bytes - STATE_BYTES) // 2
    blocks, offset, ahead = tile.blocks, column_bytes // 2, column_bytes * 8
    if tile.rows > WIDEN_ABOVE:
        blocks, value_bytes = tile.widened_blocks, 4 * TILE_LANES
        add_values_f32(end - row, sums, step, weights, first, last, blocks, 0, value_bytes, 0)
    else:
        offset += tile.key_dim * BLOCK_TOKENS * F16_BYTES
        add_values_f16(
            end - row, sums, step, weights, first, last, blocks, offset, value_bytes, ahead
        )


@helper
def _clear_totals(tile: Tile) -> None:
    """A sink is a score that comes before all others and has no value."""
    for row in range(tile.rows):
        total = tile.totals + row * tile.part_bytes
        state = total + tile.part_bytes - STATE_BYTES
        for at in range(total, state, 32):
            store_f32x8(at, 0, splat_f32x8(0.0))
        scalar_store_f32(state, _LARGEST, -np.inf)
        scalar_store_f32(state, _WEIGHTS, 0.0)
        if tile.sinks != 0:
            sink = scalar_load_f32(tile.sinks, row % tile.rows_per_query * 4)
            scalar_store_f32(state, _LARGEST, sink * _LOG2_E)
            scalar_store_f32(state, _WEIGHTS, 1.0)


@helper
def _fold_part(tile: Tile, parts: int) -> None:
    """Adds the rows' parts for one partition to their totals."""
    for row in range(tile.rows):
        part, total = parts + row * tile.part_bytes, tile.totals + row * tile.part_bytes
        state = tile.part_bytes - STATE_BYTES
        if scalar_load_i64(part + state, _LOW) < scalar_load_i64(part + state, _HIGH):
            before = broadcast_f32x8(total + state, _LARGEST)
            here = broadcast_f32x8(part + state, _LARGEST)
            largest = maximum(before, here)
            rescale, scale = _exp2(before - largest), _exp2(here - largest)
            for i in range(0, state, 32):
                kept = load_f32x8(total, i) * rescale
                store_f32x8(total, i, fma(load_f32x8(part, i), scale, kept))
            weights = broadcast_f32x8(total + state, _WEIGHTS) * rescale
            weights = fma(broadcast_f32x8(part + state, _WEIGHTS), scale, weights)
            scalar_store_f32(total + state, _LARGEST, extract(largest, 0))
            scalar_store_f32(total + state, _WEIGHTS, extract(weights, 0))


@helper
def _write_rows(tile: Tile) -> None:
    for row in range(tile.rows):
        query, head = divmod(row, tile.rows_per_query)
        out = tile.out + query * tile.out_bytes + head * tile.value_dim * 4
        total = tile.totals + row * tile.part_bytes
        weights = broadcast_f32x8(total + tile.part_bytes - STATE_BYTES, _WEIGHTS)
        for i in range(0, tile.value_dim, 8):
            result = load_f32x8(total, i * 4) / weights
            store_masked_f32x8(out, i * 4, result, lanes_below(tile.value_dim - i))


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
