"""Lane-wise arithmetic, comparison, selection and reductions.

Vectors of one type take + - * / & | ^ and, giving a mask, < <= > >= == (signed for integers).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from localllm.backends.cpu.simd.vector import (
    I32,
    Vector,
    f32x8,
    f32x16,
    f64x16,
    i32x8,
    intrinsic,
    lanes,
    mask8,
    mask16,
    overloaded,
    splat_ir,
)


def _register(op: Any, result: Callable[[Vector], Vector], build: Callable[..., Any]) -> None:
    """Defines a binary operator on two vectors of one type."""

    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:  # noqa: ARG002
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(result(args[0]), *args)
            return None

    infer_global(op)(Template)

    @lower_builtin(op, Vector, Vector)
    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return build(b, sig.args[0], *args)


def _define_arithmetic(ops: tuple[Any, ...], on_int: str | None, on_float: str | None) -> None:
    def build(b: Any, kind: Vector, x: Any, y: Any) -> Any:
        name = on_float if kind.is_float else on_int
        if name is None:
            raise TypeError(f"{ops[0].__name__} is not defined on {kind}")
        return getattr(b, name)(x, y)

    for op in ops:
        _register(op, lambda kind: kind, build)


def _define_comparison(op: Any, symbol: str) -> None:
    def build(b: Any, kind: Vector, x: Any, y: Any) -> Any:
        return (b.fcmp_ordered if kind.is_float else b.icmp_signed)(symbol, x, y)

    _register(op, lambda kind: Vector("i1", kind.n), build)


_define_arithmetic((operator.add, operator.iadd), "add", "fadd")
_define_arithmetic((operator.sub, operator.isub), "sub", "fsub")
_define_arithmetic((operator.mul, operator.imul), "mul", "fmul")
_define_arithmetic((operator.truediv, operator.itruediv), None, "fdiv")
_define_arithmetic((operator.and_, operator.iand), "and_", None)
_define_arithmetic((operator.or_, operator.ior), "or_", None)
_define_arithmetic((operator.xor, operator.ixor), "xor", None)
_define_comparison(operator.lt, "<")
_define_comparison(operator.le, "<=")
_define_comparison(operator.gt, ">")
_define_comparison(operator.ge, ">=")
_define_comparison(operator.eq, "==")


def _splatter(kind: Vector, scalar: Any) -> Any:
    @intrinsic
    def splat(typingctx: Any, value: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return splat_ir(b, context.cast(b, args[0], sig.args[0], scalar), kind.n)

        return kind(value), build

    return splat


splat_f32x8, splat_i32x8 = _splatter(f32x8, types.float32), _splatter(i32x8, types.int32)
splat_f32x16, splat_f64x16 = _splatter(f32x16, types.float32), _splatter(f64x16, types.float64)


@intrinsic
def like(typingctx: Any, x: Any, value: Any) -> Any:
    """A vector of x's type with the value in every lane."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        scalar = types.float32 if x.is_float else types.int32
        return splat_ir(b, context.cast(b, args[1], sig.args[1], scalar), x.n)

    return x(x, value), build


def _shifter(name: str) -> Any:
    @intrinsic
    def shift(typingctx: Any, value: Any, bits: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            count = context.cast(b, args[1], sig.args[1], types.int32)
            element = value.ir.element
            if element.width < 32:
                count = b.trunc(count, element)
            return getattr(b, name)(args[0], splat_ir(b, count, value.n))

        return value(value, bits), build

    return shift


shift_left, shift_right, shift_right_signed = _shifter("shl"), _shifter("lshr"), _shifter("ashr")


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding, on every machine."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return overloaded(b, "llvm.fma", *args)

    return x(x, x, x), build


def _unary(name: str, doc: str) -> Any:
    @intrinsic
    def op(typingctx: Any, x: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return overloaded(b, name, args[0])

        return f32x8(f32x8), build

    op.__doc__ = doc
    return op


absolute = _unary("llvm.fabs", "|x|")
sqrt = _unary("llvm.sqrt", "The correctly rounded square root.")
floor = _unary("llvm.floor", "The largest whole number not above x.")


def _extremum(symbol: str) -> Any:
    """x where `x symbol y`, else y: for floats this is what maxps and minps do, NaN included."""

    @intrinsic
    def op(typingctx: Any, x: Any, y: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            compare = b.fcmp_ordered if x.is_float else b.icmp_signed
            return b.select(compare(symbol, *args), *args)

        return x(x, x), build

    return op


maximum, minimum = _extremum(">"), _extremum("<")


@intrinsic
def select(typingctx: Any, mask: Any, x: Any, y: Any) -> Any:
    """x in the mask's lanes, y in the others."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(*args)

    return x(mask, x, x), build


def _lanes_below(mask: Vector) -> Any:
    @intrinsic
    def below(typingctx: Any, n: Any) -> Any:
        """Mask of the lanes whose index is below n."""

        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            limit = splat_ir(b, context.cast(b, args[0], sig.args[0], types.int32), mask.n)
            indices = ir.Constant(ir.VectorType(I32, mask.n), list(range(mask.n)))
            return b.icmp_signed("<", indices, limit)

        return mask(n), build

    return below


lanes_below, lanes_below_16 = _lanes_below(mask8), _lanes_below(mask16)


@intrinsic
def mask_bits(typingctx: Any, mask: Any) -> Any:
    """The mask as an integer, lane 0 in bit 0."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.zext(b.bitcast(args[0], ir.IntType(mask.n)), I32)

    return types.int32(mask), build


@intrinsic
def extract(typingctx: Any, vector: Any, lane: Any) -> Any:
    """One lane of a vector of float32 or int32 as a scalar."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.extract_element(args[0], context.cast(b, args[1], sig.args[1], types.int32))

    scalar = types.float32 if vector.is_float else types.int32
    return scalar(vector, lane), build


def _reducer(combine: Callable[[Any, Any, Any], Any], scalar: Any) -> Any:
    """Folds halves onto each other, so that the order is fixed: of 8, lanes 0 and 4 meet first."""

    @intrinsic
    def reduce(typingctx: Any, vector: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            x, n = args[0], vector.n
            while n > 1:
                n //= 2
                x = combine(b, lanes(b, x, list(range(n))), lanes(b, x, list(range(n, 2 * n))))
            return b.extract_element(x, ir.Constant(I32, 0))

        return scalar(vector), build

    return reduce


def _larger(compare: str, symbol: str) -> Callable[[Any, Any, Any], Any]:
    return lambda b, x, y: b.select(getattr(b, compare)(symbol, x, y), x, y)


sum_f32 = _reducer(lambda b, x, y: b.fadd(x, y), types.float32)
sum_f64 = _reducer(lambda b, x, y: b.fadd(x, y), types.float64)
sum_i32 = _reducer(lambda b, x, y: b.add(x, y), types.int32)
max_f32 = _reducer(_larger("fcmp_ordered", ">"), types.float32)
max_i32 = _reducer(_larger("icmp_signed", ">"), types.int32)
