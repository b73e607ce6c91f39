"""Conversions between element types.

float16 has an integer-arithmetic form for machines without F16C, since LLVM would call a library
routine there; both round to nearest even.
"""

from __future__ import annotations

from typing import Any

from localllm.backends.cpu import target
from localllm.backends.cpu.simd.vector import (
    ELEMENTS,
    I32,
    Vector,
    call,
    constant,
    f16x8,
    f32x8,
    f32x16,
    f64x16,
    i8x8,
    i16x8,
    i32x8,
    intrinsic,
    with_element,
)

_F16, _F32, _I16 = ELEMENTS["f16"], ELEMENTS["f32"], ELEMENTS["i16"]


def _converter(source: Vector, result: Vector, instruction: str) -> Any:
    @intrinsic
    def convert(typingctx: Any, x: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return getattr(b, instruction)(args[0], result.ir)

        return result(source), build

    return convert


i32_to_f32 = _converter(i32x8, f32x8, "sitofp")
i16_to_i32 = _converter(i16x8, i32x8, "sext")
i32_to_i8 = _converter(i32x8, i8x8, "trunc")
f32_to_f64 = _converter(f32x16, f64x16, "fpext")


def _caster(result: Vector) -> Any:
    @intrinsic
    def cast(typingctx: Any, x: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.bitcast(args[0], result.ir)

        return result(x), build

    return cast


# The same bits, seen as another type of the same size.
as_i16x8, as_i32x8, as_f32x8 = _caster(i16x8), _caster(i32x8), _caster(f32x8)


def _bits(element: str) -> Any:
    @intrinsic
    def cast(typingctx: Any, x: Any) -> Any:
        result = Vector(element, x.n)

        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.bitcast(args[0], result.ir)

        return result(x), build

    return cast


int_bits, float_bits = _bits("i32"), _bits("f32")  # of vectors of any length


@intrinsic
def f16_to_f32(typingctx: Any, x: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return f16_bits_to_f32(b, b.bitcast(args[0], with_element(x.ir, _I16)))

    return Vector("f32", x.n)(x), build


@intrinsic
def f32_to_f16(typingctx: Any, x: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(f32_to_f16_bits(b, args[0]), f16x8.ir)

    return f16x8(f32x8), build


@intrinsic
def round_to_i32(typingctx: Any, x: Any) -> Any:
    """The nearest integer, ties to even; |x| must be below 2**22."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if not target.is_x86():
            # Adding 1.5 * 2**23 leaves the rounded integer in the low mantissa bits.
            shifted = b.fadd(args[0], constant(f32x8.ir, 12582912.0))
            return b.sub(b.bitcast(shifted, i32x8.ir), constant(i32x8.ir, 0x4B400000))
        return call(b, "llvm.x86.avx.cvt.ps2dq.256", i32x8.ir, [args[0]])

    return i32x8(f32x8), build


def f16_bits_to_f32(b: Any, bits: Any) -> Any:
    """IR for float16 bits (i16, scalar or vector) to float32."""
    single = with_element(bits.type, _F32)
    if target.current() != "scalar":
        return b.fpext(b.bitcast(bits, with_element(bits.type, _F16)), single)
    wide = with_element(bits.type, I32)
    x = b.zext(bits, wide)
    sign = b.shl(b.and_(x, constant(wide, 0x8000)), constant(wide, 16))
    magnitude = b.and_(x, constant(wide, 0x7FFF))
    shifted = b.shl(magnitude, constant(wide, 13))
    normal = b.add(shifted, constant(wide, 112 << 23))  # rebias the exponent
    tiny = b.bitcast(b.fmul(b.sitofp(magnitude, single), constant(single, 2.0**-24)), wide)
    is_nan = b.icmp_signed(">", magnitude, constant(wide, 0x7C00))
    quiet = b.select(is_nan, constant(wide, 0x7FC00000), constant(wide, 0x7F800000))
    result = b.select(b.icmp_signed("<", magnitude, constant(wide, 0x400)), tiny, normal)
    is_special = b.icmp_signed(">=", magnitude, constant(wide, 0x7C00))
    result = b.select(is_special, b.or_(shifted, quiet), result)
    return b.bitcast(b.or_(result, sign), single)


def f32_to_f16_bits(b: Any, x: Any) -> Any:
    """IR for float32 (scalar or vector) to float16 bits (i16), rounding to nearest even."""
    half_bits = with_element(x.type, _I16)
    if target.current() != "scalar":
        return b.bitcast(b.fptrunc(x, with_element(x.type, _F16)), half_bits)
    wide = with_element(x.type, I32)
    bits = b.bitcast(x, wide)
    magnitude = b.and_(bits, constant(wide, 0x7FFFFFFF))
    sign = b.and_(b.lshr(bits, constant(wide, 16)), constant(wide, 0x8000))
    odd = b.and_(b.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    rebiased = b.add(b.sub(magnitude, constant(wide, 112 << 23)), constant(wide, 0xFFF))
    normal = b.lshr(b.add(rebiased, odd), constant(wide, 13))
    # Adding 0.5, whose last bit is worth 2**-24, rounds a subnormal to a multiple of that.
    sum_ = b.fadd(b.bitcast(magnitude, x.type), constant(x.type, 0.5))
    tiny = b.sub(b.bitcast(sum_, wide), constant(wide, 0x3F000000))
    payload = b.and_(b.lshr(magnitude, constant(wide, 13)), constant(wide, 0x3FF))
    nan = b.or_(payload, constant(wide, 0x7E00))
    result = b.select(b.icmp_signed("<", magnitude, constant(wide, 113 << 23)), tiny, normal)
    too_large = b.icmp_signed(">=", magnitude, constant(wide, 0x477FF000))  # 65520
    result = b.select(too_large, constant(wide, 0x7C00), result)
    is_nan = b.icmp_signed(">", magnitude, constant(wide, 0x7F800000))
    result = b.select(is_nan, nan, result)
    return b.trunc(b.or_(result, sign), half_bits)
