"""Attention of one tile of rows, partition by partition: scores, weights, sums of values."""

from __future__ import annotations

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import helper, inlined
from localllm.backends.cpu.kernels.attention_layout import HIGH, LOW, STATE_BYTES, Span, Tile
from localllm.backends.cpu.kernels.attention_softmax import (
    LOG2_E,
    clear_totals,
    fold_part,
    weigh,
    write_rows,
)
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
    atomic_add,
    f16_to_f32,
    lanes_below,
    load_f16x8,
    load_masked_f32x8,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_i64,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
    store_release,
)

WIDEN_ABOVE = 2 * MOST_ROWS  # rows of a tile that make it worth to widen keys and values once


@helper
def load_queries(tile: Tile, q: int, q_bytes: int, scale: float) -> None:
    """Fills tile.q with what turns scores into powers of two, or into the softcap's argument."""
    factor = splat_f32x8(scale / tile.softcap if tile.softcap != 0 else scale * LOG2_E)
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
    clear_totals(tile)
    for i in range(skip, skip + count):
        to = tile.parts if shared == 0 else shared + i * step
        _compute_part(tile, span.first + i, span.first + skip + count, to)
        if shared == 0:
            fold_part(tile, to)
    if shared != 0:
        n_parts = span.end - span.first
        if atomic_add(done, 0, count) + count < n_parts:
            return
        store_release(done, 0, 0)  # for the next layer
        for i in range(n_parts):
            fold_part(tile, shared + i * step)
    write_rows(tile)


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
        scalar_store_i64(state, LOW, max(0, position - tile.window + 1))
        scalar_store_i64(state, HIGH, min(PARTITION, position + 1))
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
        weigh(tile, tile.scores + row * SCORE_BYTES, to + row * tile.part_bytes)
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
        low = scalar_load_i64(state + (end - 1 - row) * tile.part_bytes, LOW)
        high = scalar_load_i64(state, HIGH)
        if low >= high:
            low = high = PARTITION
        for r in range(row, end):
            first = scalar_load_i64(state + (r - row) * tile.part_bytes, LOW)
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, HIGH)
            _add_values(tile, r, r + 1, column_bytes, to, first, min(low, last))
        _add_values(tile, row, end, column_bytes, to, low, high)
        for r in range(row, end):
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, HIGH)
            _add_values(tile, r, r + 1, column_bytes, to, high, last)


@helper
def _widen_values(tile: Tile, column_bytes: int, to: int) -> None:
    """16 columns of the values that the rows see, as float32."""
    state = to + tile.part_bytes - STATE_BYTES
    first = scalar_load_i64(state, LOW) // BLOCK_TOKENS
    last = scalar_load_i64(state + (tile.rows - 1) * tile.part_bytes, HIGH)
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
