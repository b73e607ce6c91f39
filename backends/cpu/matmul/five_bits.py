"""Five-bit quants: nibbles, with the fifth bits of 8 groups in a vector of their own.

A unit has 160 bytes: 32 of fifth bits [row][4], then four vectors of nibbles. The low nibbles of
vector i are group i of one run of 16 k, the high nibbles group i of another; their fifth bits are
bit i and bit 4+i of the bytes at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.simd import i8x32, scalar_load_u8

FIVE_BIT_UNIT = 160


def five_bits(e: Emitter, unit: Value) -> Iterator[tuple[int, Value, Value]]:
    """Yields (i, quants of the low group i, quants of the high group i)."""
    fifth = e.load(i8x32, unit, 0)
    for i in range(4):
        packed = e.load(i8x32, unit, 32 + 32 * i)
        low = fifth << (4 - i)
        high = fifth >> i
        yield i, (packed & 15) | (low & 16), (packed >> 4) | (high & 16)


@helper
def five_bit_quant(unit: Any, row: Any, half: Any, k: Any) -> Any:
    """Quant of one row at k 0..15 of the low (half 0) or high (half 1) run of a unit."""
    at = row * 4 + (k & 3)
    nibble = scalar_load_u8(unit, 32 + 32 * (k >> 2) + at) >> 4 * half & 15
    fifth = scalar_load_u8(unit, at) >> (4 * half + (k >> 2)) & 1
    return nibble | fifth << 4
