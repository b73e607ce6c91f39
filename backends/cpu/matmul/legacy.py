"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: 32 k to a block, with one float16 scale.

Packed blocks of eight rows: d f16[row], for Q4_1 and Q5_1 the minimum f16[row], then

    Q4_0, Q4_1   quants[i 0..3][row][4]: low nibbles are k = 4i.., high nibbles k = 16 + 4i..
    Q5_0, Q5_1   a five-bit unit (see `five_bits`)
    Q8_0         quants[i 0..7][row][4], as unsigned bytes 128 larger than in the file

Where there is no minimum, quants are too large by a constant; sums of activations take it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.five_bits import five_bit_quant, five_bits
from localllm.backends.cpu.matmul.layout import IntegerLayout
from localllm.backends.cpu.simd import (
    i8x32,
    i16x8,
    scalar_load_f16,
    scalar_load_i16,
    scalar_load_u8,
    scalar_load_u32,
    scalar_store_f32,
    scalar_store_i16,
    scalar_store_i32,
)


class Legacy(IntegerLayout):
    block = 32
    groups = 8
    activation = "q8_32"

    @property
    def first(self) -> int:
        """Offset of the quants in a packed block."""
        return 16 * self.n_factors

    def factors(self, e: Emitter, block: Value) -> list[Value]:
        return [e.to_f32(e.load(i16x8, block, 16 * i)) for i in range(self.n_factors)]


class FourBits(Legacy):
    chain = 8  # 15 * 127 * 2 * 8 = 30480

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for i in range(4):
            packed = e.load(i8x32, block, self.first + 32 * i)
            yield 0, i, packed & 15
            yield 0, 4 + i, packed >> 4


class FiveBits(Legacy):
    chain = 4  # 31 * 127 * 2 * 4 = 31496

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for i, low, high in five_bits(e, block + self.first):
            yield 0, i, low
            yield 0, 4 + i, high


@helper
def pack_nibbles(source: Any, target: Any, row: Any) -> None:
    for i in range(4):
        scalar_store_i32(target, 32 * i + 4 * row, scalar_load_u32(source, 4 * i))


@helper
def _every_fourth_bit(bits: Any) -> Any:
    """Bits 0, 4, 8 ... 28 of a word, as a byte."""
    bits &= 0x11111111
    bits = (bits | bits >> 3) & 0x03030303
    bits = (bits | bits >> 6) & 0x000F000F
    return (bits | bits >> 12) & 0xFF


@helper
def _pack_five_bits(source: Any, unit: Any, row: Any) -> None:
    """From the file's 4 bytes of fifth bits, bit k for k, and 16 of nibbles."""
    bits, fifth = scalar_load_u32(source, 0), 0
    for i in range(4):
        fifth |= _every_fourth_bit(bits >> i) << 8 * i
    scalar_store_i32(unit, 4 * row, fifth)
    pack_nibbles(source + 4, unit + 32, row)


@helper
def nibble(quants: Any, row: Any, k: Any) -> Any:
    at = 32 * (k >> 2 & 3) + 4 * row + (k & 3)
    return scalar_load_u8(quants, at) >> 4 * (k >> 4) & 15


class Q40(FourBits):
    name = "Q4_0"
    block_bytes = 144
    file_block_bytes = 18
    n_factors = 1
    excess_bits = 3

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        pack_nibbles(source + 2, block + 16, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for k in range(32):
            scalar_store_f32(out, 4 * k, scale * np.float32(nibble(block + 16, row, k) - 8))


class Q41(FourBits):
    name = "Q4_1"
    block_bytes = 160
    file_block_bytes = 20
    n_factors = 2

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        scalar_store_i16(block, 16 + 2 * row, scalar_load_i16(source, 2))
        pack_nibbles(source + 4, block + 32, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale, minimum = scalar_load_f16(block, 2 * row), scalar_load_f16(block, 16 + 2 * row)
        for k in range(32):
            value = scale * np.float32(nibble(block + 32, row, k)) + minimum
            scalar_store_f32(out, 4 * k, value)


class Q50(FiveBits):
    name = "Q5_0"
    block_bytes = 176
    file_block_bytes = 22
    n_factors = 1
    excess_bits = 4

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        _pack_five_bits(source + 2, block + 16, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for k in range(32):
            quant = five_bit_quant(block + 16, row, k >> 4, k & 15) - 16
            scalar_store_f32(out, 4 * k, scale * np.float32(quant))


class Q51(FiveBits):
    name = "Q5_1"
    block_bytes = 192
    file_block_bytes = 24
    n_factors = 2

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        scalar_store_i16(block, 16 + 2 * row, scalar_load_i16(source, 2))
        _pack_five_bits(source + 4, block + 32, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale, minimum = scalar_load_f16(block, 2 * row), scalar_load_f16(block, 16 + 2 * row)
        for k in range(32):
            quant = five_bit_quant(block + 32, row, k >> 4, k & 15)
            scalar_store_f32(out, 4 * k, scale * np.float32(quant) + minimum)


class Q80(Legacy):
    name = "Q8_0"
    block_bytes = 272
    file_block_bytes = 34
    n_factors = 1
    whole_bytes = True
    chain = 8  # of nibbles

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for group in range(8):
            quants = e.load(i8x32, block, self.first + 32 * group)
            for part, value in enumerate(dots.byte_parts(quants)):
                yield part, group, value

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        for group in range(8):
            quants = scalar_load_u32(source, 2 + 4 * group) ^ 0x80808080
            scalar_store_i32(block, 16 + 32 * group + 4 * row, quants)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for k in range(32):
            quant = scalar_load_u8(block, 16 + 32 * (k >> 2) + 4 * row + (k & 3)) - 128
            scalar_store_f32(out, 4 * k, scale * np.float32(quant))
