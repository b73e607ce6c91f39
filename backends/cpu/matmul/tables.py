"""IQ4_NL, IQ4_XS and MXFP4: four bits that number the entries of a table.

Packed blocks of eight rows (byte offset, then content; [a][b] is row-major):

    IQ4_NL  as Q4_0: 0 d f16[row], 16 nibbles of 32 k
    MXFP4   0 exponent u8[row], 8 nibbles of 32 k
    IQ4_XS  0 d f16[row], 16 six-bit scales [j 0..3][row][2] of sub-blocks 2j and 2j+1,
            64 nibbles of 32 k for each of eight sub-blocks

Nibbles of 32 k are [i 0..3][row][4], the low ones k = 4i.., the high ones 16 + 4i...
A table's entries are made unsigned; sums of activations take that back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.activations import SUMS32
from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.k_quant import WithSignedScales
from localllm.backends.cpu.matmul.legacy import Legacy, nibble, pack_nibbles
from localllm.backends.cpu.matmul.six_bits import get_six_bits, put_six_bits, unpack_six_bits
from localllm.backends.cpu.simd import (
    f32x8,
    i8x8,
    i8x32,
    scalar_load_f16,
    scalar_load_f32,
    scalar_load_i16,
    scalar_load_u8,
    scalar_load_u16,
    scalar_store_f32,
    scalar_store_i8,
    scalar_store_i16,
    scalar_store_i32,
)

# Eight-bit numbers that lie closer together near zero, of IQ4_NL and IQ4_XS.
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the numbers of a sign, two bits of exponent and one of mantissa (FP4 E2M1).
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_NON_LINEAR, _FP4 = np.array(NON_LINEAR, np.float32), np.array(FP4, np.float32)  # of one number
_SCALES, _QUANTS = 16, 64  # offsets in packed IQ4_XS blocks
_SIX_BITS = 16  # bytes of a vector of six-bit numbers


def _nibbles(e: Emitter, address: Value) -> Iterator[tuple[int, Value]]:
    """Yields (group, numbers of entries) of 32 k."""
    for i in range(4):
        packed = e.load(i8x32, address, 32 * i)
        yield i, packed & 15
        yield 4 + i, packed >> 4


def _non_linear(e: Emitter, dots: Dots, index: Value) -> Iterator[tuple[int, Value]]:
    """Yields (part, quants)."""
    for part, table in enumerate(zip(*(dots.byte_parts(n + 128) for n in NON_LINEAR), strict=True)):
        yield part, e.lookup(table, index)


@helper
def _non_linear_row(quants: Any, row: Any, factor: Any, out: Any) -> None:
    for k in range(32):
        scalar_store_f32(out, 4 * k, factor * _NON_LINEAR[nibble(quants, row, k)])


class IQ4NL(Legacy):
    name = "IQ4_NL"
    block_bytes = 144
    file_block_bytes = 18
    n_factors = 1
    whole_bytes = True
    chain = 8  # of nibbles

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        for group, index in _nibbles(e, block + self.first):
            for part, quants in _non_linear(e, dots, index):
                yield part, group, quants

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        pack_nibbles(source + 2, block + 16, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        _non_linear_row(block + 16, row, scalar_load_f16(block, 2 * row), out)


class IQ4XS(WithSignedScales):
    """x = d * (scale - 32) * entry."""

    name = "IQ4_XS"
    block_bytes = 1088
    file_block_bytes = 136
    units = 4
    groups = 8
    whole_bytes = True
    chain = 8  # of nibbles
    n_pairs = 4
    sums = SUMS32

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        parts = self.parts(dots)
        for sub in range(2):
            at = block + unit * 256 + (_QUANTS + 128 * sub)
            for group, index in _nibbles(e, at):
                for part, quants in _non_linear(e, dots, index):
                    yield sub * parts + part, group, quants

    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        unpack_six_bits(e, _SIX_BITS, block + _SCALES, buffer, minus=32)
        return buffer

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i16(block, 2 * row, scalar_load_i16(source, 0))
        high = scalar_load_u16(source, 2)
        for sub in range(8):
            low = scalar_load_u8(source, 4 + (sub >> 1)) >> 4 * (sub & 1) & 15
            scale = low | (high >> 2 * sub & 3) << 4
            put_six_bits(block + _SCALES, _SIX_BITS, _scale_at(sub, row), scale)
            pack_nibbles(source + 8 + 16 * sub, block + _QUANTS + 128 * sub, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        scale = scalar_load_f16(block, 2 * row)
        for sub in range(8):
            number = get_six_bits(block + _SCALES, _SIX_BITS, _scale_at(sub, row)) - 32
            quants = block + _QUANTS + 128 * sub
            _non_linear_row(quants, row, scale * np.float32(number), out + 128 * sub)


@helper
def _scale_at(sub: Any, row: Any) -> Any:
    return (sub >> 1) * 16 + row * 2 + (sub & 1)


class MXFP4(Legacy):
    """x = 2**(exponent - 128) * entry."""

    name = "MXFP4"
    block_bytes = 136
    file_block_bytes = 17
    n_factors = 1
    excess_bits = 4
    chain = 4  # 28 * 127 * 2 * 4 = 28448

    @property
    def first(self) -> int:
        return 8

    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        table = [entry + 16 for entry in FP4]
        for group, index in _nibbles(e, block + self.first):
            yield 0, group, e.lookup(table, index)

    def factors(self, e: Emitter, block: Value) -> list[Value]:
        exponent = e.zero_extend(e.load(i8x8, block, 0), "i32")
        # 2**-128 and 2**-127 are below the least normal number.
        tiny = e.minimum((exponent + 1) << 21, 1 << 22)
        return [e.cast(e.maximum((exponent - 1) << 23, tiny), f32x8)]

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        scalar_store_i8(block, row, scalar_load_u8(source, 0))
        pack_nibbles(source + 1, block + 8, row)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        exponent = scalar_load_u8(block, row)
        bits = max((exponent - 1) << 23, min((exponent + 1) << 21, 1 << 22))
        scalar_store_i32(out, 0, bits)
        factor = scalar_load_f32(out, 0)
        for k in range(32):
            scalar_store_f32(out, 4 * k, factor * _FP4[nibble(block + 8, row, k)])
