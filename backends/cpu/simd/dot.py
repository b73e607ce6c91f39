"""Integer dot products of neighbouring lanes, the heart of quantized matmuls.

These build IR, for any number of lanes that the target has; `b` is the IR builder. The caller
sees to it that no sum overflows the result's element.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from localllm.backends.cpu import target
from localllm.backends.cpu.simd.vector import ELEMENTS, call, in_parts, lanes


def dot2_u8i8(b: Any, x: Any, y: Any) -> Any:
    """i8 lanes, x unsigned and y signed, to half as many i16."""
    result = _vector("i16", x.type.count // 2)
    if target.is_x86():
        name = {16: "llvm.x86.avx2.pmadd.ub.sw", 32: "llvm.x86.avx512.pmaddubs.w.512"}
        return call(b, name[result.count], result, [x, y])
    wide = _vector("i16", x.type.count)
    return add_pairs(b, b.mul(b.zext(x, wide), b.sext(y, wide)))


def dot2_i16(b: Any, x: Any, y: Any) -> Any:
    """i16 lanes to half as many i32."""
    result = _vector("i32", x.type.count // 2)
    if target.is_x86():
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
        return call(b, name[result.count], result, [x, y])
    wide = _vector("i32", x.type.count)
    return add_pairs(b, b.mul(b.sext(x, wide), b.sext(y, wide)))


def add_dot2_i16(b: Any, total: Any, x: Any, y: Any) -> Any:
    """total + what `dot2_i16` gives, in one instruction; of the isas avx512 and vnni."""
    words = [b.bitcast(v, total.type) for v in (x, y)]
    name = f"llvm.x86.avx512.vpdpwssd.{total.type.count * 32}"
    return call(b, name, total.type, [total, *words])


def dot4_u8i8(b: Any, total: Any, x: Any, y: Any) -> Any:
    """total + the sums of four products of i8 lanes, x unsigned and y signed.

    Of the isas avx512, vnni and i8mm.
    """
    if not target.is_x86():
        return _neon_dot4(b, "llvm.aarch64.neon.usdot", total, x, y)
    n = total.type.count
    words = [b.bitcast(v, total.type) for v in (x, y)]
    return call(b, f"llvm.x86.avx512.vpdpbusd.{n * 32}", total.type, [total, *words])


def dot4_i8i8(b: Any, total: Any, x: Any, y: Any) -> Any:
    """The same, x and y signed; of the isa dotprod."""
    return _neon_dot4(b, "llvm.aarch64.neon.sdot", total, x, y)


def _neon_dot4(b: Any, name: str, total: Any, x: Any, y: Any) -> Any:
    def one(*parts: Any) -> Any:
        return call(b, f"{name}.v4i32.v16i8", _vector("i32", 4), list(parts))

    return in_parts(b, total.type.count // 4, one, total, x, y)


def _vector(element: str, n: int) -> Any:
    return ir.VectorType(ELEMENTS[element], n)


def add_pairs(b: Any, x: Any) -> Any:
    """Sums of neighbouring lanes."""
    n = x.type.count
    return b.add(lanes(b, x, list(range(0, n, 2))), lanes(b, x, list(range(1, n, 2))))
