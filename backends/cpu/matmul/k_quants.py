"""Q4_K, Q5_K and Q6_K: 256 k to a block, with an integer scale for each 32 or 16 of them.

Packed blocks of eight rows (byte offset, then content; [a][b] is row-major):

    Q4_K  0 d f16[row], 16 dmin f16[row], 32 scales, 128 quants
          quants[j 0..3][g 0..7][row][4]: low nibbles are sub-block 2j, high nibbles 2j+1
    Q5_K  as Q4_K up to 128, then eight five-bit units (see `five_bits`): for j 0..3 first and
          second half of the sub-blocks 2j (low) and 2j+1 (high)
    Q6_K  0 d f16[row], 16 scales i8[j 0..7][row][2] of sub-blocks 2j and 2j+1, 144 quants
          for each sub-block of 16: 32 bytes of low nibbles of groups 0 (low half) and 1 (high),
          32 of groups 2 and 3, 32 of upper bit pairs, group i in bits 2i and 2i+1

Scales of Q4_K and Q5_K have six bits (see `six_bits`): scale[sub-block][row], then
minimum[j][row][2] of sub-blocks 2j and 2j+1, in pairs that meet pairs of activation sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.activations import SUMS16, SUMS32
from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.five_bits import FIVE_BIT_UNIT, five_bit_quant, five_bits
from localllm.backends.cpu.matmul.k_quant import WithMinima, WithSignedScales
from localllm.backends.cpu.matmul.six_bits import get_six_bits, put_six_bits, unpack_six_bits
from localllm.backends.cpu.simd import (
    i8x8,
    i8x16,
    i8x32,
    scalar_load_f16,
    scalar_load_i8,
    scalar_load_i16,
    scalar_load_u8,
    scalar_load_u32,
    scalar_store_f32,
    scalar_store_i8,
    scalar_store_i16,
    scalar_store_i32,
)

_SCALES = 32  # offsets in packed Q4_K and Q5_K blocks
_QUANTS = 128
_SIX_BITS = 32  # bytes of a vector of six-bit numbers


class SixBitScales(WithMinima):
    """Sub-blocks of 32."""

    units = 4
    groups = 8
    n_pairs = 4
    sums = SUMS32

    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        """Scales[sub-block][row], then pairs of minima."""
        unpack_six_bits(e, _SIX_BITS, block + _SCALES, buffer)
        return buffer

    def scale(self, e: Emitter, head: Value, unit: Value, sub: int) -> Value:
        return e.zero_extend(e.load(i8x8, head + unit * 16, 8 * sub), "i32")

    def pair(self, e: Emitter, head: Value, index: int) -> Value:
        return e.zero_extend(e.load(i8x16, head, 64 + 16 * index), "i16")


@helper
def six_bit_scale(scales: Any, i: Any) -> Any:
    """Scale of sub-block i in the file's 12 bytes."""
    if i < 4:
        return scalar_load_u8(scales, i) & 63
    return (scalar_load_u8(scales, i + 4) & 15) | (scalar_load_u8(scales, i - 4) >> 6 << 4)


@helper
def six_bit_minimum(scales: Any, i: Any) -> Any:
    if i < 4:
        return scalar_load_u8(scales, i + 4) & 63
    return (scalar_load_u8(scales, i + 4) >> 4) | (scalar_load_u8(scales, i) >> 6 << 4)


@helper
def _scale_index(sub: Any, row: Any) -> Any:
    return sub * 8 + row


@helper
def _minimum_index(sub: Any, row: Any) -> Any:
    return 64 + (sub >> 1) * 16 + row * 2 + (sub & 1)


@helper
def _pack_head(source: Any, block: Any, row: Any) -> None:
    scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
    scalar_store_i16(block, 16 + 2 * row, scalar_load_i16(source, 2))
    for sub in range(8):
        scales = block + _SCALES
        put_six_bits(scales, _SIX_BITS, _scale_index(sub, row), six_bit_scale(source + 4, sub))
        put_six_bits(scales, _SIX_BITS, _minimum_index(sub, row), six_bit_minimum(source + 4, sub))


class Q4K(SixBitScales):
    name = "Q4_K"
    block_bytes = 1152
    file_block_bytes = 144
    chain = 8  # 15 * 127 * 2 * 8 = 30480
    narrow = 4  # 15 * 127 * 16 = 30480

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        at = block + unit * 256
        for group in range(8):
            packed = e.load(i8x32, at, _QUANTS + 32 * group)
            yield 0, group, packed & 15
            yield 1, group, packed >> 4

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        _pack_head(source, block, row)
        for word in range(32):
            packed = scalar_load_u32(source, 16 + 4 * word)
            scalar_store_i32(block, _QUANTS + 32 * word + 4 * row, packed)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale, minimum = scalar_load_f16(block, 2 * row), scalar_load_f16(block, 16 + 2 * row)
        for sub in range(8):
            scales = block + _SCALES
            factor = scale * np.float32(get_six_bits(scales, _SIX_BITS, _scale_index(sub, row)))
            offset = minimum * np.float32(get_six_bits(scales, _SIX_BITS, _minimum_index(sub, row)))
            for k in range(32):
                at = _QUANTS + (sub >> 1) * 256 + (k >> 2) * 32 + row * 4 + (k & 3)
                quant = scalar_load_u8(block, at) >> 4 * (sub & 1) & 15
                scalar_store_f32(out, (sub * 32 + k) * 4, factor * np.float32(quant) - offset)


class Q5K(SixBitScales):
    name = "Q5_K"
    block_bytes = 1408
    file_block_bytes = 176
    chain = 4  # 31 * 127 * 2 * 4 = 31496

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        at = block + unit * (2 * FIVE_BIT_UNIT)
        for half in range(2):
            for i, low, high in five_bits(e, at + (_QUANTS + half * FIVE_BIT_UNIT)):
                yield 0, 4 * half + i, low
                yield 1, 4 * half + i, high

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        _pack_head(source, block, row)
        for word in range(32):
            pair, group = word >> 3, word & 7
            unit = block + _QUANTS + (word >> 2) * FIVE_BIT_UNIT + row * 4
            packed = scalar_load_u32(source, 48 + 4 * word)
            scalar_store_i32(unit, 32 + 32 * (group & 3), packed)
            # bit `sub-block` of the file's byte k
            bits = scalar_load_u32(source, 16 + 4 * group) >> 2 * pair
            bits = (bits & 0x01010101) | (bits >> 1 & 0x01010101) << 4
            fifth = scalar_load_u32(unit, 0) | bits << (group & 3)
            scalar_store_i32(unit, 0, fifth)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale, minimum = scalar_load_f16(block, 2 * row), scalar_load_f16(block, 16 + 2 * row)
        for sub in range(8):
            scales = block + _SCALES
            factor = scale * np.float32(get_six_bits(scales, _SIX_BITS, _scale_index(sub, row)))
            offset = minimum * np.float32(get_six_bits(scales, _SIX_BITS, _minimum_index(sub, row)))
            for k in range(32):
                unit = block + _QUANTS + ((sub >> 1) * 2 + (k >> 4)) * FIVE_BIT_UNIT
                quant = five_bit_quant(unit, row, sub & 1, k & 15)
                scalar_store_f32(out, (sub * 32 + k) * 4, factor * np.float32(quant) - offset)


class Q6K(WithSignedScales):
    """x = d * scale * (quant - 32), in sub-blocks of 16."""

    name = "Q6_K"
    block_bytes = 1680
    file_block_bytes = 210
    units = 8
    groups = 4
    chain = 2  # 63 * 127 * 2 * 2 = 32004
    n_pairs = 8
    sums = SUMS16
    excess_bits = 5

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for sub in range(2):
            at = block + (unit * 2 + sub) * 96
            first, second, upper = (e.load(i8x32, at, 144 + 32 * i) for i in range(3))
            yield sub, 0, (first & 15) | ((upper << 4) & 48)
            yield sub, 1, (first >> 4) | ((upper << 2) & 48)
            yield sub, 2, (second & 15) | (upper & 48)
            yield sub, 3, (second >> 4) | ((upper >> 2) & 48)

    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        return block + 16

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 208))
        for sub in range(16):
            scale = scalar_load_i8(source, 192 + sub)
            scalar_store_i8(block, 16 + (sub >> 1) * 16 + row * 2 + (sub & 1), scale)
            # The file has 128 k at a time: nibbles k and 64 + k share a byte, bit pairs
            # k, 32 + k, 64 + k and 96 + k another.
            unit = block + 144 + sub * 96 + row * 4
            half, k = sub >> 3, (sub & 7) * 16
            nibbles, nibble = source + half * 64 + (k & 63), (k >> 6) * 4
            uppers, pair = source + 128 + half * 32 + (k & 31), (k >> 5) * 2
            upper = 0
            for i in range(4):
                upper |= (scalar_load_u32(uppers, 4 * i) >> pair & 0x03030303) << 2 * i
            for i in range(2):
                low = scalar_load_u32(nibbles, 8 * i) >> nibble & 0x0F0F0F0F
                high = scalar_load_u32(nibbles, 8 * i + 4) >> nibble & 0x0F0F0F0F
                scalar_store_i32(unit, 32 * i, low | high << 4)
            scalar_store_i32(unit, 64, upper)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for sub in range(16):
            at = 16 + (sub >> 1) * 16 + row * 2 + (sub & 1)
            factor = scale * np.float32(scalar_load_i8(block, at))
            for k in range(16):
                unit, group = block + 144 + sub * 96 + row * 4 + (k & 3), k >> 2
                nibble = scalar_load_u8(unit, 32 * (group >> 1)) >> 4 * (group & 1) & 15
                upper = scalar_load_u8(unit, 64) >> 2 * group & 3
                quant = (nibble | upper << 4) - 32
                scalar_store_f32(out, (sub * 16 + k) * 4, factor * np.float32(quant))
