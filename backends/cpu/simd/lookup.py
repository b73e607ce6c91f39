"""A table of sixteen bytes, looked up by every lane of a vector; builds IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir

from localllm.backends.cpu import target
from localllm.backends.cpu.simd.vector import I8, call, constant, in_parts


def lookup16(b: Any, table: Sequence[int], index: Any) -> Any:
    """table[i] for each of 32 i8 lanes i of 0..15; entries are bytes, 0..255."""
    n = index.type.count
    if target.is_x86():
        both = ir.Constant(index.type, [*table] * (n // 16))  # a shuffle stays in its 16 lanes
        return call(b, "llvm.x86.avx2.pshuf.b", index.type, [both, index])
    if target.is_neon():
        half = ir.Constant(ir.VectorType(I8, 16), [*table])

        def one(part: Any) -> Any:
            return call(b, "llvm.aarch64.neon.tbl1.v16i8", half.type, [half, part])

        return in_parts(b, n // 16, one, index)
    return select16(b, table, index)


def select16(b: Any, table: Sequence[int], index: Any) -> Any:
    """The same on any machine: halves the table by one bit of the index after another."""
    entries = [constant(index.type, value) for value in table]
    for bit in range(4):
        zero, mask = constant(index.type, 0), constant(index.type, 1 << bit)
        is_set = b.icmp_unsigned("!=", b.and_(index, mask), zero)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [b.select(is_set, odd, even) for even, odd in pairs]
    return entries[0]
