"""Q2_K and Q3_K: 256 k to a block, an integer scale for each 16 of them.

Packed blocks of eight rows (byte offset, then content; [a][b] is row-major):

    Q2_K  0 d f16[row], 16 dmin f16[row], 32 scales [j 0..7][row][2] of sub-blocks 2j and 2j+1,
          scale in the low nibble, minimum in the high one, 160 quants
          for each sub-block 32 bytes [row][4]: group i in bits 2i and 2i+1
    Q3_K  0 d f16[row], 16 six-bit scales [j 0..7][row][2], 112 quants
          for each pair of sub-blocks 32 bytes of low bit pairs for either, as of Q2_K, then 32 of
          upper bits: group i in bit i for the first sub-block, 4+i for the second
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.activations import SUMS16
from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.k_quant import WithMinima, WithSignedScales
from localllm.backends.cpu.matmul.six_bits import get_six_bits, put_six_bits, unpack_six_bits
from localllm.backends.cpu.simd import (
    i8x16,
    i8x32,
    i32x8,
    scalar_load_f16,
    scalar_load_i16,
    scalar_load_u8,
    scalar_load_u32,
    scalar_store_f32,
    scalar_store_i8,
    scalar_store_i16,
    scalar_store_i32,
)

_SCALES2, _QUANTS2 = 32, 160  # offsets in packed blocks
_SCALES3, _QUANTS3 = 16, 112
_SIX_BITS = 32  # bytes of a vector of six-bit numbers


@helper
def _scale_at(sub: Any, row: Any) -> Any:
    return (sub >> 1) * 16 + row * 2 + (sub & 1)


@helper
def _bit_pairs(quants: Any, sub: Any) -> Any:
    """The 16 bit pairs of a sub-block in the file, as a packed word: k = 4i.. in bits 2i, 2i+1.

    The file has 128 k at a time: k, 32 + k, 64 + k and 96 + k share byte k of 32.
    """
    at, shift = quants + (sub >> 3) * 32 + (sub & 1) * 16, (sub >> 1 & 3) * 2
    word = 0
    for i in range(4):
        word |= (scalar_load_u32(at, 4 * i) >> shift & 0x03030303) << 2 * i
    return word


class Q2K(WithMinima):
    name = "Q2_K"
    block_bytes = 672
    file_block_bytes = 84
    units = 8
    groups = 4
    chain = 4  # 3 * 127 * 2 * 4 = 3048
    narrow = 4  # 3 * 127 * 16 = 6096
    n_pairs = 8
    sums = SUMS16

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for sub in range(2):
            packed = e.load(i8x32, block + unit * 64, _QUANTS2 + 32 * sub)
            for group in range(4):
                yield sub, group, (packed >> 2 * group) & 3

    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        return block + _SCALES2

    def scale(self, e: Emitter, head: Value, unit: Value, sub: int) -> Value:
        both = e.cast(e.zero_extend(e.load(i8x16, head + unit * 16), "i16"), i32x8)
        return (both >> 16 * sub) & 15

    def pair(self, e: Emitter, head: Value, index: int) -> Value:
        return e.zero_extend(e.load(i8x16, head, 16 * index) >> 4, "i16")

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 80))
        scalar_store_i16(block, 16 + 2 * row, scalar_load_i16(source, 82))
        for sub in range(16):
            scalar_store_i8(block, _SCALES2 + _scale_at(sub, row), scalar_load_u8(source, sub))
            word = _bit_pairs(source + 16, sub)
            scalar_store_i32(block, _QUANTS2 + 32 * sub + 4 * row, word)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale, minimum = scalar_load_f16(block, 2 * row), scalar_load_f16(block, 16 + 2 * row)
        for sub in range(16):
            both = scalar_load_u8(block, _SCALES2 + _scale_at(sub, row))
            factor, offset = scale * np.float32(both & 15), minimum * np.float32(both >> 4)
            for k in range(16):
                packed = scalar_load_u8(block, _QUANTS2 + 32 * sub + 4 * row + (k & 3))
                quant = packed >> 2 * (k >> 2) & 3
                scalar_store_f32(out, (sub * 16 + k) * 4, factor * np.float32(quant) - offset)


@helper
def _six_bit_scale(scales: Any, sub: Any) -> Any:
    """Of sub-block `sub`, from the file's 12 bytes: four low bits, then two high ones."""
    low = scalar_load_u8(scales, sub & 7) >> 4 * (sub >> 3) & 15
    return low | (scalar_load_u8(scales, 8 + (sub & 3)) >> 2 * (sub >> 2) & 3) << 4


class Q3K(WithSignedScales):
    """x = d * (scale - 32) * (quant - 4)."""

    name = "Q3_K"
    block_bytes = 880
    file_block_bytes = 110
    units = 8
    groups = 4
    chain = 4  # 7 * 127 * 2 * 4 = 7112
    narrow = 4  # 7 * 127 * 16 = 14224
    n_pairs = 8
    sums = SUMS16
    excess_bits = 2

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        at = block + unit * 96
        upper = e.load(i8x32, at, _QUANTS3 + 64)
        for sub in range(2):
            packed = e.load(i8x32, at, _QUANTS3 + 32 * sub)
            for group in range(4):
                bit = 4 * sub + group
                high = upper << (2 - bit) if bit < 2 else upper >> (bit - 2)
                yield sub, group, ((packed >> 2 * group) & 3) | (high & 4)

    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        unpack_six_bits(e, _SIX_BITS, block + _SCALES3, buffer, minus=32)
        return buffer

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 108))
        for sub in range(16):
            scale = _six_bit_scale(source + 96, sub)
            put_six_bits(block + _SCALES3, _SIX_BITS, _scale_at(sub, row), scale)
        for pair in range(8):
            unit = block + _QUANTS3 + pair * 96 + 4 * row
            for half in range(2):
                scalar_store_i32(unit, 32 * half, _bit_pairs(source + 32, 2 * pair + half))
            # The upper bits: k, 32 + k, ... 224 + k share byte k of 32.
            upper = 0
            for i in range(8):
                upper |= (scalar_load_u32(source, 4 * i) >> pair & 0x01010101) << i
            scalar_store_i32(unit, 64, upper)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for sub in range(16):
            number = get_six_bits(block + _SCALES3, _SIX_BITS, _scale_at(sub, row)) - 32
            factor = scale * np.float32(number)
            for k in range(16):
                unit, group = block + _QUANTS3 + (sub >> 1) * 96 + 4 * row + (k & 3), k >> 2
                low = scalar_load_u8(unit, 32 * (sub & 1)) >> 2 * group & 3
                high = scalar_load_u8(unit, 64) >> (4 * (sub & 1) + group) & 1
                quant = (low | high << 2) - 4
                scalar_store_f32(out, (sub * 16 + k) * 4, factor * np.float32(quant))
