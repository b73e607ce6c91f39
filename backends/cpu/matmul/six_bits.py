"""Six-bit scales: four vectors of bytes in the space of three.

The fourth vector lies in the upper two bits of the others, its bits 0 and 1 in the first.
Numbers are counted through all four; `size` is the bytes of one vector.
"""

from __future__ import annotations

from typing import Any

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.simd import Vector, scalar_load_u8, scalar_store_i8


def unpack_six_bits(e: Emitter, size: int, packed: Value, to: Value, minus: int = 0) -> None:
    """Stores the 4 * size numbers as bytes, each less by `minus`."""
    kind = Vector("i8", size)
    stored = [e.load(kind, packed, size * i) for i in range(3)]
    fourth = (stored[0] >> 6) | ((stored[1] >> 6) << 2) | ((stored[2] >> 6) << 4)
    for i, vector in enumerate([*(v & 63 for v in stored), fourth]):
        e.store(vector - minus if minus else vector, to, size * i)


@helper
def put_six_bits(packed: Any, size: Any, index: Any, value: Any) -> None:
    """Sets a number that was zero."""
    if index < 3 * size:
        _or_byte(packed, index, value)
    else:
        for i in range(3):
            _or_byte(packed, index - 3 * size + size * i, (value >> 2 * i & 3) << 6)


@helper
def get_six_bits(packed: Any, size: Any, index: Any) -> Any:
    if index < 3 * size:
        return scalar_load_u8(packed, index) & 63
    value = 0
    for i in range(3):
        value |= (scalar_load_u8(packed, index - 3 * size + size * i) >> 6) << 2 * i
    return value


@helper
def _or_byte(address: Any, offset: Any, bits: Any) -> None:
    scalar_store_i8(address, offset, scalar_load_u8(address, offset) | bits)
