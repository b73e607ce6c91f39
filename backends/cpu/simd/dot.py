"""Integer dot products of neighbouring lanes, the heart of quantized matmuls.

`dot2_*` multiply lanes and add neighbours in twos. The caller sees to it that no sum overflows
the result's element type.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from localllm.backends.cpu import target
from localllm.backends.cpu.simd.vector import (
    call,
    i8x32,
    i16x16,
    i32x8,
    intrinsic,
    lanes,
)


@intrinsic
def dot2_u8i8(typingctx: Any, x: Any, y: Any) -> Any:
    """i16[l] = u8(x[2l]) * y[2l] + u8(x[2l+1]) * y[2l+1]."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return dot2_u8i8_ir(b, *args)

    return i16x16(i8x32, i8x32), build


@intrinsic
def dot2_i16(typingctx: Any, x: Any, y: Any) -> Any:
    """i32[l] = x[2l] * y[2l] + x[2l+1] * y[2l+1]."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return dot2_i16_ir(b, *args)

    return i32x8(i16x16, i16x16), build


def dot2_u8i8_ir(b: Any, x: Any, y: Any) -> Any:
    if target.current() != "scalar":
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", i16x16.ir, [x, y])
    return _pairs(b, b.zext(x, _lanes_of(i16x16, 32)), b.sext(y, _lanes_of(i16x16, 32)))


def dot2_i16_ir(b: Any, x: Any, y: Any) -> Any:
    if target.current() != "scalar":
        return call(b, "llvm.x86.avx2.pmadd.wd", i32x8.ir, [x, y])
    return _pairs(b, b.sext(x, _lanes_of(i32x8, 16)), b.sext(y, _lanes_of(i32x8, 16)))


def _lanes_of(kind: Any, n: int) -> Any:
    return ir.VectorType(kind.ir.element, n)


def _pairs(b: Any, x: Any, y: Any) -> Any:
    products = b.mul(x, y)
    n = products.type.count
    return b.add(lanes(b, products, list(range(0, n, 2))), lanes(b, products, list(range(1, n, 2))))
