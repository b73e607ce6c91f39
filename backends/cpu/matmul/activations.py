"""Activation formats: what the columns of a matmul are turned into first.

A panel of n columns is stored in records of 256 k, [chunk of k][column], so that a tile finds
neighbouring columns side by side; the last chunk may be short of k. Records:

    q8_256  int8[256], one scale for all of them: 0 quants, 256 sums i16[16] over 16 quants each,
            288 sums i16[8] over 32 each, 304 scale f32
    q8_32   int8[256], a scale for each 32: 0 quants, 256 scales f32[8], 288 scale * sum f32[8],
            320 sums i32[8]
    f32     float32[256], zero past the last k up to a multiple of 32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from localllm.backends.cpu.simd import (
    as_f32x8,
    as_i32x8,
    extract,
    i32_to_i8,
    lanes_below,
    load_f32x8,
    load_masked_f32x8,
    max_i32,
    maximum,
    round_to_i32,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f32,
    scalar_store_i16,
    scalar_store_i32,
    splat_f32x8,
    splat_i32x8,
    store_f32x8,
    store_i8x8,
    sum_i32,
)

CHUNK = 256
SUMS16, SUMS32, SCALE = 256, 288, 304  # in a record of q8_256
SCALES, SCALED_SUMS, SUMS = 256, 288, 320  # in a record of q8_32
RECORD_BYTES = {"q8_256": 320, "q8_32": 352, "f32": 1024}

CLAIM_CHUNKS = 8  # of one column
_TINY = np.float32(1e-30)  # 127 / x stays finite


@helper
def _largest(x: Any, count: Any) -> Any:
    """max |x| over `count` floats, a multiple of 8; NaN if one of them is.

    Compared as integers, positive floats keep their order, and NaN is above all of them.
    """
    largest, magnitude = splat_i32x8(0), splat_i32x8(0x7FFFFFFF)
    for k in range(0, count, 8):
        largest = maximum(largest, as_i32x8(load_f32x8(x, 4 * k)) & magnitude)
    return extract(as_f32x8(splat_i32x8(max_i32(largest))), 0)


@helper
def _quantize16(x: Any, inverse: Any, out: Any) -> Any:
    """Stores 16 quants and returns the sum of them."""
    factor = splat_f32x8(inverse)
    first = round_to_i32(load_f32x8(x, 0) * factor)
    second = round_to_i32(load_f32x8(x, 32) * factor)
    store_i8x8(out, 0, i32_to_i8(first))
    store_i8x8(out, 8, i32_to_i8(second))
    return sum_i32(first + second)


@helper
def _inverse(largest: Any) -> Any:
    """What maps -largest..largest to -127..127; 0 where that is not possible."""
    if largest > _TINY:
        return np.float32(127.0) / largest
    return np.float32(0.0)


@helper
def _record_q8_256(x: Any, out: Any, count: Any) -> None:
    largest = _largest(x, CHUNK)
    inverse = _inverse(largest)
    scalar_store_f32(out, SCALE, largest / np.float32(127.0))
    for i in range(8):
        first = _quantize16(x + 128 * i, inverse, out + 32 * i)
        second = _quantize16(x + 128 * i + 64, inverse, out + 32 * i + 16)
        scalar_store_i16(out, SUMS16 + 4 * i, first)
        scalar_store_i16(out, SUMS16 + 4 * i + 2, second)
        scalar_store_i16(out, SUMS32 + 2 * i, first + second)


@helper
def _record_q8_32(x: Any, out: Any, count: Any) -> None:
    for i in range(count // 32):
        largest = _largest(x + 128 * i, 32)
        scale, inverse = largest / np.float32(127.0), _inverse(largest)
        total = _quantize16(x + 128 * i, inverse, out + 32 * i)
        total += _quantize16(x + 128 * i + 64, inverse, out + 32 * i + 16)
        scalar_store_f32(out, SCALES + 4 * i, scale)
        scalar_store_f32(out, SCALED_SUMS + 4 * i, scale * np.float32(total))
        scalar_store_i32(out, SUMS + 4 * i, total)


@helper
def _record_f32(x: Any, out: Any, count: Any) -> None:
    for k in range(0, count - 7, 8):
        store_f32x8(out, 4 * k, load_f32x8(x, 4 * k))
    for k in range(count // 8 * 8, (count + 31) // 32 * 32, 8):
        store_f32x8(out, 4 * k, load_masked_f32x8(x, 4 * k, lanes_below(count - k)))


RECORDERS = {"q8_256": _record_q8_256, "q8_32": _record_q8_32, "f32": _record_f32}
"""record(x, out, count): a record of `count` float32 (256, or fewer at the end of a row)."""


@kernel_factory
def quantizer(name: str) -> Kernel:
    """Turns rows of float32 into a panel; see `lower_linear.QuantizeArgs` for the arguments."""
    record, record_bytes = RECORDERS[name], RECORD_BYTES[name]

    @kernel
    def quantize(args: int, tid: int, n: int) -> None:
        x, stride = arg_i64(args, 2), arg_i64(args, 3) * 4
        cols, out = arg_i64(args, 5), arg_i64(args, 6)
        gathered, gather = arg_i64(args, 7), arg_i64(args, 8)
        if gathered:
            columns = scalar_load_i64(arg_i64(args, 9), 0)
        else:
            columns = row_count(args, arg_i64(args, 4))
        chunks = (cols + CHUNK - 1) // CHUNK
        pieces = (chunks + CLAIM_CHUNKS - 1) // CLAIM_CHUNKS
        item = claim(args, 1)
        while item < columns * pieces:
            column, first = item // pieces, item % pieces * CLAIM_CHUNKS
            row = column
            if gathered:
                row = int(scalar_load_i32(gather, 4 * column))
            for chunk in range(first, min(first + CLAIM_CHUNKS, chunks)):
                source = x + row * stride + chunk * (CHUNK * 4)
                target = out + (chunk * columns + column) * record_bytes
                record(source, target, min(CHUNK, cols - chunk * CHUNK))
            item = claim(args, 1)

    return quantize


@dataclass(frozen=True)
class ActivationFormat:
    name: str

    def bytes(self, n_rows: int, cols: int) -> int:
        """Size of a panel of `n_rows` columns of the matmul, each `cols` long."""
        return n_rows * -(-cols // CHUNK) * RECORD_BYTES[self.name]

    @property
    def is_quantized(self) -> bool:
        return self.name != "f32"

    @property
    def quantize(self) -> Kernel:
        return quantizer(self.name)
