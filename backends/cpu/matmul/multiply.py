"""The matmul kernel: who computes which rows of which columns.

Threads claim pieces: some row blocks, times all columns of a segment when they are few, else
times a panel of columns, narrow enough for its sums to stay in the first-level cache.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localllm.backends.cpu.kernel import (
    Kernel,
    arg_i64,
    claim,
    helper,
    kernel,
    kernel_factory,
    row_count,
)
from localllm.backends.cpu.matmul.activations import CHUNK, RECORD_BYTES
from localllm.backends.cpu.matmul.formats import LAYOUTS
from localllm.backends.cpu.matmul.layout import VECTOR, Layout
from localllm.backends.cpu.matmul.shape import tile_shape
from localllm.backends.cpu.matmul.sources import unpacked_bytes, unpacker
from localllm.backends.cpu.matmul.tiles import packed_tile, unpacked_tile
from localllm.backends.cpu.simd import (
    inline,
    lanes_below,
    load_f32x8,
    load_masked_f32x8,
    mask_bits,
    max_f32,
    scalar_load_i64,
    scalar_store_f32,
    select,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
)

# Words of the argument block.
PANEL, PACKED, ROWS, COLS, OUT, OUT_STRIDE, ROW_KIND, BIAS = range(2, 10)
SCRATCH, SCRATCH_BYTES, SEGMENTS, SEGMENT_START, SEGMENT_BYTES = range(10, 15)
RESIDUAL, RESIDUAL_STRIDE, MAXIMA = range(15, 18)

_PANEL = 240  # columns at most
_CLAIM_BYTES = 8192  # of weights, at least


def inlined(function: Any) -> Any:
    """A part of the kernel; as a function of its own it would be turned into code twice."""
    return numba.njit(inline="always", error_model="numpy")(function)


def scratch_bytes(layout: Layout) -> int:
    """What a thread needs: one unpacked chunk, then the sums of a panel."""
    row_blocks = tile_shape(layout).row_blocks
    return CHUNK // layout.block * unpacked_bytes(layout, row_blocks) + _PANEL * row_blocks * VECTOR


@kernel_factory
def multiplier(name: str) -> Kernel:
    """out = panel @ weights.T + bias + residual; see `lower_linear.MatmulArgs`."""
    layout = LAYOUTS[name]
    few, many = _few_columns(layout), _many_columns(layout)
    block, block_bytes = layout.block, layout.block_bytes
    shape = tile_shape(layout)
    few_limit, step = shape.few, shape.row_blocks

    @kernel
    def matmul(args: int, tid: int, n: int) -> None:
        row_blocks = (arg_i64(args, ROWS) + 7) // 8
        row_bytes = (arg_i64(args, COLS) + block - 1) // block * block_bytes
        least = _CLAIM_BYTES // row_bytes + 1
        shares, steps = _count_shares(row_blocks, n, least), (row_blocks + step - 1) // step
        scratch = arg_i64(args, SCRATCH) + tid * arg_i64(args, SCRATCH_BYTES)
        segments = max(1, arg_i64(args, SEGMENTS))
        segment, before = 0, 0
        item = claim(args, 1)
        while True:
            start, end = _segment(args, segment)
            is_few = end - start <= few_limit
            panels = (end - start + _PANEL - 1) // _PANEL
            pieces = panels * (shares if is_few else steps)
            if item - before >= pieces:
                before += pieces
                segment += 1
                if segment == segments:
                    return
                continue
            weights = arg_i64(args, PACKED) + segment * arg_i64(args, SEGMENT_BYTES)
            piece = item - before
            if is_few:
                first, last = _share(row_blocks, n, least, piece)
                few(args, weights, row_bytes, first, last, start, end, scratch)
            else:
                left = start + (end - start) * (piece // steps) // panels
                right = start + (end - start) * (piece // steps + 1) // panels
                many(args, weights, row_bytes, piece % steps * step, left, right, scratch)
            item = claim(args, 1)

    return matmul


@helper
def _share(total: Any, n: Any, least: Any, piece: Any) -> Any:
    """Row blocks of a piece, where n threads take pieces that get smaller.

    The first n share half the rows, the next n half of the rest. Long runs are read fastest; the
    small ones at the end let all threads finish at once.
    """
    first, size = 0, total
    if n > 1:
        size = max(total // (2 * n), least)
    while piece >= n and first < total:
        first += n * size
        size = max((total - first) // (2 * n), least)
        piece -= n
    first = min(first + piece * size, total)
    return first, min(first + size, total)


@helper
def _count_shares(total: Any, n: Any, least: Any) -> Any:
    count = 0
    while _share(total, n, least, count)[0] < total:
        count += 1
    return count


@helper
def _columns(args: Any) -> Any:
    """Columns of the whole panel."""
    segments = arg_i64(args, SEGMENTS)
    if segments > 0:
        return scalar_load_i64(arg_i64(args, SEGMENT_START), 8 * segments)
    return row_count(args, arg_i64(args, ROW_KIND))


@helper
def _segment(args: Any, segment: Any) -> Any:
    """First column of a segment, and the one past its last."""
    if arg_i64(args, SEGMENTS) > 0:
        start = arg_i64(args, SEGMENT_START)
        return scalar_load_i64(start, 8 * segment), scalar_load_i64(start, 8 * segment + 8)
    return 0, _columns(args)


@inline
def _finish(args: Any, sums: Any, column: Any, row_block: Any, count: Any) -> None:
    """Adds bias and residual to one column's sums of `count` row blocks and stores them."""
    row, left = 8 * row_block, arg_i64(args, ROWS) - 8 * row_block
    maxima = arg_i64(args, MAXIMA)
    if maxima:
        maxima += (column * ((arg_i64(args, ROWS) + 7) // 8) + row_block) * 4
    out = arg_i64(args, OUT) + (column * arg_i64(args, OUT_STRIDE) + row) * 4
    bias, residual = arg_i64(args, BIAS), arg_i64(args, RESIDUAL)
    if bias:
        bias += row * 4
    if residual:
        residual += (column * arg_i64(args, RESIDUAL_STRIDE) + row) * 4
    whole = min(count, left // 8) * VECTOR
    for at in range(0, whole, VECTOR):
        value = load_f32x8(sums, at)
        if bias:
            value += load_f32x8(bias, at)
        if residual:
            value += load_f32x8(residual, at)
        store_f32x8(out, at, value)
        if maxima:
            scalar_store_f32(maxima, at // 8, _largest(value))
    if 0 < left < 8 * count and left % 8:
        mask, value = lanes_below(left % 8), load_f32x8(sums, whole)
        if bias:
            value += load_masked_f32x8(bias, whole, mask)
        if residual:
            value += load_masked_f32x8(residual, whole, mask)
        store_masked_f32x8(out, whole, value, mask)
        if maxima:
            value = select(mask, value, splat_f32x8(-np.inf))
            scalar_store_f32(maxima, whole // 8, _largest(value))


@inline
def _largest(x: Any) -> Any:
    """NaN if one of them is."""
    largest = max_f32(x)
    if mask_bits(x == x) != 255:
        largest = np.float32(np.nan)
    return largest


def _few_columns(layout: Layout) -> Any:
    """few(args, weights, row_bytes, first, last, start, end, scratch): row blocks first..last."""
    one, two, three, four = (packed_tile(layout, columns) for columns in (1, 2, 3, 4))
    block, record = layout.block, RECORD_BYTES[layout.activation]

    @inlined
    def few(
        args: Any,
        weights: Any,
        row_bytes: Any,
        first: Any,
        last: Any,
        start: Any,
        end: Any,
        sums: Any,
    ) -> None:
        panel = arg_i64(args, PANEL)
        blocks = (arg_i64(args, COLS) + block - 1) // block
        stride = _columns(args) * record
        for row_block in range(first, last):
            at, column = weights + row_block * row_bytes, start
            while column < end:
                columns = end - column
                if columns > 4:  # two tiles of about the same size
                    columns = (columns + 1) >> 1
                x = panel + column * record
                for i in range(columns):
                    store_f32x8(sums, i * VECTOR, splat_f32x8(0.0))
                if columns == 1:
                    one(at, x, stride, sums, blocks)
                elif columns == 2:
                    two(at, x, stride, sums, blocks)
                elif columns == 3:
                    three(at, x, stride, sums, blocks)
                else:
                    four(at, x, stride, sums, blocks)
                for i in range(columns):
                    _finish(args, sums + i * VECTOR, column + i, row_block, 1)
                column += columns

    return few


def _many_columns(layout: Layout) -> Any:
    """many(args, weights, row_bytes, first, start, end, scratch): a tile's row blocks."""
    shape = tile_shape(layout)
    wide, middle, _ = shape.columns
    row_blocks, sum_bytes = shape.row_blocks, shape.row_blocks * VECTOR
    wide_tile, middle_tile, one = (unpacked_tile(layout, n, shape) for n in shape.columns)
    unpack = unpacker(layout, row_blocks)
    block, block_bytes, record = layout.block, layout.block_bytes, RECORD_BYTES[layout.activation]
    in_chunk = CHUNK // block
    chunk_bytes = in_chunk * unpacked_bytes(layout, row_blocks)

    @inlined
    def many(
        args: Any, weights: Any, row_bytes: Any, first: Any, start: Any, end: Any, scratch: Any
    ) -> None:
        panel, columns = arg_i64(args, PANEL), _columns(args)
        rows, blocks = arg_i64(args, ROWS), (arg_i64(args, COLS) + block - 1) // block
        sums = scratch + chunk_bytes
        for i in range((end - start) * row_blocks):
            store_f32x8(sums, i * VECTOR, splat_f32x8(0.0))
        for chunk in range((blocks + in_chunk - 1) // in_chunk):
            done = chunk * in_chunk
            count = min(in_chunk, blocks - done)
            for i in range(row_blocks):
                row_block = min(first + i, (rows - 1) // 8)
                at = weights + row_block * row_bytes + done * block_bytes
                unpack(at, scratch + i * VECTOR, count)
            x = panel + (chunk * columns + start) * record
            out, left = sums, end - start
            while left >= wide:
                wide_tile(scratch, x, 0, out, count)
                x, out, left = x + wide * record, out + wide * sum_bytes, left - wide
            while left >= middle:
                middle_tile(scratch, x, 0, out, count)
                x, out, left = x + middle * record, out + middle * sum_bytes, left - middle
            while left > 0:
                one(scratch, x, 0, out, count)
                x, out, left = x + record, out + sum_bytes, left - 1
        for column in range(start, end):
            _finish(args, sums + (column - start) * sum_bytes, column, first, row_blocks)

    return many
