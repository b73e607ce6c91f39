"""SIMD vectors as a Numba type.

`Vector(elem, n)` is represented by an LLVM vector, so that kernels hold SIMD registers in plain
Python variables; accumulators stay in registers across loops. Every operation is an intrinsic of
a few LLVM instructions. Fast-math is never used: results depend only on the order written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import register_model

ELEMENTS = {
    "i1": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "f32": 32}
I8, I32, I64 = ELEMENTS["i8"], ELEMENTS["i32"], ELEMENTS["i64"]


class Vector(types.Type):
    """`n` lanes of element type `elem`; integer lanes have no sign of their own."""

    def __init__(self, elem: str, n: int) -> None:
        self.elem = elem
        self.n = n
        super().__init__(name=f"{elem}x{n}")

    @property
    def ir(self) -> Any:
        return ir.VectorType(ELEMENTS[self.elem], self.n)

    @property
    def is_float(self) -> bool:
        return self.elem.startswith("f")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


i8x8, i8x16, i8x32 = Vector("i8", 8), Vector("i8", 16), Vector("i8", 32)
i16x8, i16x16 = Vector("i16", 8), Vector("i16", 16)
i32x8, f16x8, f32x8 = Vector("i32", 8), Vector("f16", 8), Vector("f32", 8)
f16x16, f32x16 = Vector("f16", 16), Vector("f32", 16)
f64x16 = Vector("f64", 16)
mask8, mask16 = Vector("i1", 8), Vector("i1", 16)


def intrinsic(fn: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, typed."""
    return _numba_intrinsic(fn)


# The rest of this module builds LLVM IR inside intrinsics; `b` is always the IR builder.


def constant(like: Any, value: int | float) -> Any:
    """A constant of an IR type, the same value in every lane of a vector type."""
    if isinstance(like, ir.VectorType):
        return ir.Constant(like, [value] * like.count)
    return ir.Constant(like, value)


def with_element(like: Any, element: Any) -> Any:
    """The IR type `like` (scalar or vector) with another element type."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Calls an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def overloaded(b: Any, name: str, *args: Any) -> Any:
    """Calls an LLVM intrinsic such as `llvm.fma` that is overloaded on its arguments' one type."""
    kind = args[0].type
    suffix = f"v{kind.count}{_short(kind.element)}" if hasattr(kind, "count") else _short(kind)
    return call(b, f"{name}.{suffix}", kind, list(args))


def _short(element: Any) -> str:
    if isinstance(element, ir.FloatType):
        return "f32"
    return f"i{element.width}"


def lanes(b: Any, x: Any, indices: list[int]) -> Any:
    """The named lanes of x, in that order."""
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def in_parts(b: Any, count: int, operation: Callable[..., Any], *vectors: Any) -> Any:
    """An operation that has narrower vectors: applied to `count` parts of each, side by side."""
    results = []
    for i in range(count):
        sizes = [v.type.count // count for v in vectors]
        pairs = zip(vectors, sizes, strict=True)
        results.append(operation(*(lanes(b, v, list(range(i * n, i * n + n))) for v, n in pairs)))
    while len(results) > 1:
        pairs = zip(results[::2], results[1::2], strict=True)
        results = [_side_by_side(b, first, second) for first, second in pairs]
    return results[0]


def _side_by_side(b: Any, x: Any, y: Any) -> Any:
    n = 2 * x.type.count
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, n), list(range(n))))


def splat_ir(b: Any, scalar: Any, n: int) -> Any:
    """A vector with the scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    return lanes(b, b.insert_element(empty, scalar, ir.Constant(I32, 0)), [0] * n)


def pointer(context: Any, b: Any, sig: Any, args: Any, element: Any) -> Any:
    """Pointer to an element at (address, byte offset), an intrinsic's first two arguments."""
    base = context.cast(b, args[0], sig.args[0], types.int64)
    offset = context.cast(b, args[1], sig.args[1], types.int64)
    start = b.inttoptr(base, I8.as_pointer())
    return b.bitcast(b.gep(start, [offset], source_etype=I8), element.as_pointer())
