"""Attention of one tile of rows, partition by partition: scores, weights, sums of values."""

from __future__ import annotations

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import call_kernel, helper, inlined
from localllm.backends.cpu.kernels.attention_layout import HIGH, LOW, STATE_BYTES, Span, Tile
from localllm.backends.cpu.kernels.attention_softmax import (
    LOG2_E,
    clear_totals,
    fold_part,
    weigh,
    write_rows,
)
from localllm.backends.cpu.kernels.attention_tiles import (
    LANES,
    PARTITION,
    PARTITION_BLOCKS,
    SCORE_BYTES,
    few_rows,
    most_rows,
    row_step,
    tile_vectors,
)
from localllm.backends.cpu.kernels.kv import F16_BYTES
from localllm.backends.cpu.simd import (
    atomic_add,
    f16_to_f32,
    lanes_below,
    load_f16x16,
    load_masked_f32x8,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_i64,
    splat_f32x8,
    store_f32x16,
    store_masked_f32x8,
    store_release,
)

_VECTOR_BYTES = 4 * LANES
_SCORE_F16, _SCORE_F32, _VALUES_F16, _VALUES_F32, _VECTOR_F16, _VECTOR_F32 = range(6)  # Tile.code


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
    for block in range(2 * PARTITION_BLOCKS):
        # A window has given back what lies before `first`.
        index = min(part * PARTITION_BLOCKS + max(block, first), last)
        number = scalar_load_i32(tile.table, index * 4)
        scalar_store_i64(tile.blocks, block * 8, tile.cache + number * tile.block_bytes)
    for block in range(first // tile_vectors() * tile_vectors(), end, tile_vectors()):
        _score_blocks(tile, base, block)
    for row in range(tile.rows):
        weigh(tile, tile.scores + row * SCORE_BYTES, to + row * tile.part_bytes)
    columns, at = tile.part_bytes - STATE_BYTES, 0
    while at < columns:
        vectors = 1
        if at + tile_vectors() * _VECTOR_BYTES <= columns:
            vectors = tile_vectors()
        _sum_values(tile, at, vectors, to)
        at += vectors * _VECTOR_BYTES


@helper
def _score_blocks(tile: Tile, base: int, block: int) -> None:
    """Scores of a vector's, or two vectors', blocks for the rows that see some of them.

    What a row does not see gets scores too, which `weigh` overrules.
    """
    start = base + block * BLOCK_TOKENS
    row = min(max(0, start - tile.position) * tile.rows_per_query, tile.rows - 1)
    seen = start + tile_vectors() * BLOCK_TOKENS - 1 + tile.window - tile.position
    end = min(tile.rows, seen * tile.rows_per_query)
    keys, ahead = tile.blocks + block * 8, tile.key_dim * BLOCK_TOKENS * F16_BYTES
    wide = tile.rows > few_rows()
    if wide:
        _widen_keys(tile, keys)
    while row < end:
        q = tile.q + row * tile.key_dim * 4
        to = tile.scores + row * SCORE_BYTES + block * BLOCK_TOKENS * 4
        height = _tile_height(end - row, wide)
        if wide and height >= row_step():
            _score(tile, _SCORE_F32, height, tile.widened_blocks, q, to, 0)
        else:
            _score(tile, _SCORE_F16, height, keys, q, to, ahead)
        row += height


@helper
def _tile_height(rows: int, wide: bool) -> int:
    """Rows of the next register tile of so many; below `row_step()` it reads float16."""
    if wide and rows >= row_step():
        return min(most_rows(), rows // row_step() * row_step())
    return min(few_rows(), rows)


@helper
def _widen_keys(tile: Tile, keys: int) -> None:
    """Keys of a vector's, or two vectors', blocks as float32, alternating by block."""
    for v in range(tile_vectors()):
        source, to = scalar_load_i64(keys, v * 8), tile.widened + v * _VECTOR_BYTES
        scalar_store_i64(tile.widened_blocks, v * 8, to)
        for d in range(tile.key_dim):
            key = f16_to_f32(load_f16x16(source, d * LANES * F16_BYTES))
            store_f32x16(to, d * tile_vectors() * _VECTOR_BYTES, key)


@helper
def _sum_values(tile: Tile, column_bytes: int, vectors: int, to: int) -> None:
    """Adds the weighted values of some vectors of columns to all rows' parts.

    The positions that all rows of a register tile see go together; those before and after them
    row by row, so that nothing of a position that a row does not see enters its sum.
    """
    wide = tile.rows > few_rows()
    if wide:
        _widen_values(tile, column_bytes, vectors, to)
    row = 0
    while row < tile.rows:
        height = _tile_height(tile.rows - row, wide)
        end = min(tile.rows, row + height)
        state = to + (row + 1) * tile.part_bytes - STATE_BYTES
        low = scalar_load_i64(state + (end - 1 - row) * tile.part_bytes, LOW)
        high = scalar_load_i64(state, HIGH)
        if low >= high:
            low = high = PARTITION
        for r in range(row, end):
            first = scalar_load_i64(state + (r - row) * tile.part_bytes, LOW)
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, HIGH)
            _add_values(tile, r, 1, column_bytes, vectors, to, first, min(low, last))
        if wide and height >= row_step():
            _add_widened_values(tile, row, height, column_bytes, vectors, to, low, high)
        else:
            _add_values(tile, row, height, column_bytes, vectors, to, low, high)
        for r in range(row, end):
            last = scalar_load_i64(state + (r - row) * tile.part_bytes, HIGH)
            _add_values(tile, r, 1, column_bytes, vectors, to, high, last)
        row += height


@helper
def _widen_values(tile: Tile, column_bytes: int, vectors: int, to: int) -> None:
    """Some columns of the values that the rows see, as float32."""
    state = to + tile.part_bytes - STATE_BYTES
    first = scalar_load_i64(state, LOW) // BLOCK_TOKENS
    last = scalar_load_i64(state + (tile.rows - 1) * tile.part_bytes, HIGH)
    value_bytes, row_bytes = (tile.part_bytes - STATE_BYTES) // 2, vectors * _VECTOR_BYTES
    for block in range(first, (last + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
        values = scalar_load_i64(tile.blocks, block * 8) + column_bytes // 2
        values += tile.key_dim * BLOCK_TOKENS * F16_BYTES
        widened = tile.widened + block * BLOCK_TOKENS * row_bytes
        scalar_store_i64(tile.widened_blocks, block * 8, widened)
        for t in range(BLOCK_TOKENS):
            for v in range(vectors):
                value = f16_to_f32(load_f16x16(values, t * value_bytes + v * LANES * F16_BYTES))
                store_f32x16(widened, t * row_bytes + v * _VECTOR_BYTES, value)


@helper
def _add_widened_values(
    tile: Tile, row: int, height: int, column_bytes: int, vectors: int, to: int, low: int, high: int
) -> None:
    """Positions low..high of `height` rows."""
    code = _VECTOR_F32 if vectors == 1 else _VALUES_F32
    row_bytes, blocks = vectors * _VECTOR_BYTES, tile.widened_blocks
    _add(tile, code, row, height, column_bytes, to, low, high, blocks, 0, row_bytes, 0)


@helper
def _add_values(
    tile: Tile, row: int, height: int, column_bytes: int, vectors: int, to: int, low: int, high: int
) -> None:
    """Positions low..high of `height` rows."""
    code = _VECTOR_F16 if vectors == 1 else _VALUES_F16
    value_bytes, blocks = (tile.part_bytes - STATE_BYTES) // 2, tile.blocks
    offset, ahead = tile.key_dim * BLOCK_TOKENS * F16_BYTES + column_bytes // 2, column_bytes * 8
    _add(tile, code, row, height, column_bytes, to, low, high, blocks, offset, value_bytes, ahead)


@helper
def _score(tile: Tile, code: int, height: int, keys: int, q: int, to: int, ahead: int) -> None:
    """Calls a `score_kernel`."""
    scalar_store_i64(tile.call, 0, keys)
    scalar_store_i64(tile.call, 8, tile.key_dim)
    scalar_store_i64(tile.call, 16, q)
    scalar_store_i64(tile.call, 24, to)
    scalar_store_i64(tile.call, 32, ahead)
    call_kernel(scalar_load_i64(tile.code, 8 * code), tile.call, height, 0)


@helper
def _add(
    tile: Tile,
    code: int,
    row: int,
    height: int,
    column_bytes: int,
    to: int,
    low: int,
    high: int,
    blocks: int,
    offset: int,
    value_bytes: int,
    ahead: int,
) -> None:
    """Calls a `value_kernel`, unless there are no positions."""
    if low >= high:
        return
    scalar_store_i64(tile.call, 0, to + row * tile.part_bytes + column_bytes)
    scalar_store_i64(tile.call, 8, tile.part_bytes)
    scalar_store_i64(tile.call, 16, tile.scores + row * SCORE_BYTES)
    scalar_store_i64(tile.call, 24, low)
    scalar_store_i64(tile.call, 32, high)
    scalar_store_i64(tile.call, 40, blocks)
    scalar_store_i64(tile.call, 48, offset)
    scalar_store_i64(tile.call, 56, value_bytes)
    scalar_store_i64(tile.call, 64, ahead)
    call_kernel(scalar_load_i64(tile.code, 8 * code), tile.call, height, 0)
