"""Loads and stores at an int64 address plus a byte offset; nothing needs to be aligned."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from localllm.backends.cpu.simd.convert import f16_bits_to_f32
from localllm.backends.cpu.simd.vector import (
    ELEMENTS,
    I8,
    I32,
    I64,
    Vector,
    call,
    f16x8,
    f16x16,
    f32x8,
    f32x16,
    i8x8,
    i32x8,
    intrinsic,
    mask8,
    pointer,
    splat_ir,
)


def _loader(kind: Vector) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.load(pointer(context, b, sig, args, kind.ir), align=1, typ=kind.ir)

        return kind(address, offset), build

    return load


def _storer(kind: Vector) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, offset: Any, value: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            b.store(args[2], pointer(context, b, sig, args, kind.ir), align=1)
            return context.get_dummy_value()

        return types.void(address, offset, kind), build

    return store


load_i32x8, load_f16x8, load_f32x8 = _loader(i32x8), _loader(f16x8), _loader(f32x8)
store_i8x8, store_i32x8 = _storer(i8x8), _storer(i32x8)
store_f16x8, store_f32x8 = _storer(f16x8), _storer(f32x8)
load_f16x16, load_f32x16, store_f32x16 = _loader(f16x16), _loader(f32x16), _storer(f32x16)


def _broadcaster(kind: Vector) -> Any:
    @intrinsic
    def broadcast(typingctx: Any, address: Any, offset: Any) -> Any:
        """One float32, in every lane."""

        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            at = pointer(context, b, sig, args, ELEMENTS["f32"])
            return splat_ir(b, b.load(at, align=1, typ=ELEMENTS["f32"]), kind.n)

        return kind(address, offset), build

    return broadcast


broadcast_f32x8, broadcast_f32x16 = _broadcaster(f32x8), _broadcaster(f32x16)


def _scalar_loader(element: str, kind: Any) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            at = pointer(context, b, sig, args, ELEMENTS[element])
            return b.load(at, align=1, typ=ELEMENTS[element])

        return kind(address, offset), build

    return load


def _unsigned_loader(element: str) -> Any:
    """Widens to int64: Numba turns sums of its own signed and unsigned types into floats."""

    @intrinsic
    def load(typingctx: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            at = pointer(context, b, sig, args, ELEMENTS[element])
            return b.zext(b.load(at, align=1, typ=ELEMENTS[element]), I64)

        return types.int64(address, offset), build

    return load


def _scalar_storer(element: str, kind: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, offset: Any, value: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            at = pointer(context, b, sig, args, ELEMENTS[element])
            b.store(context.cast(b, args[2], sig.args[2], kind), at, align=1)
            return context.get_dummy_value()

        return types.void(address, offset, value), build

    return store


scalar_load_i8 = _scalar_loader("i8", types.int8)
scalar_load_i16 = _scalar_loader("i16", types.int16)
scalar_load_i32 = _scalar_loader("i32", types.int32)
scalar_load_i64 = _scalar_loader("i64", types.int64)
scalar_load_f32 = _scalar_loader("f32", types.float32)
scalar_load_u8, scalar_load_u16 = _unsigned_loader("i8"), _unsigned_loader("i16")
scalar_load_u32 = _unsigned_loader("i32")
scalar_load_f64 = _scalar_loader("f64", types.float64)

scalar_store_i8, scalar_store_i16 = (
    _scalar_storer("i8", types.int8),
    _scalar_storer("i16", types.int16),
)
scalar_store_i32, scalar_store_i64 = (
    _scalar_storer("i32", types.int32),
    _scalar_storer("i64", types.int64),
)
scalar_store_f32 = _scalar_storer("f32", types.float32)
scalar_store_f64 = _scalar_storer("f64", types.float64)


@intrinsic
def scalar_load_f16(typingctx: Any, address: Any, offset: Any) -> Any:
    """A float16, widened to float32."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, b, sig, args, ELEMENTS["i16"])
        return f16_bits_to_f32(b, b.load(at, align=1, typ=ELEMENTS["i16"]))

    return types.float32(address, offset), build


@intrinsic
def load_masked_f32x8(typingctx: Any, address: Any, offset: Any, mask: Any) -> Any:
    """Lanes outside the mask are 0, and their memory is not touched."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, b, sig, args, f32x8.ir)
        zero = ir.Constant(f32x8.ir, None)
        return _masked(b, "llvm.masked.load", f32x8.ir, [at], [args[2], zero])

    return f32x8(address, offset, mask8), build


@intrinsic
def store_masked_f32x8(typingctx: Any, address: Any, offset: Any, value: Any, mask: Any) -> Any:
    """Memory of lanes outside the mask is not touched."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, b, sig, args, f32x8.ir)
        _masked(b, "llvm.masked.store", ir.VoidType(), [args[2], at], [args[3]])
        return context.get_dummy_value()

    return types.void(address, offset, f32x8, mask8), build


def _masked(b: Any, name: str, result: Any, before: list[Any], after: list[Any]) -> Any:
    align = ir.Constant(I32, 1)
    return call(b, f"{name}.v8f32.p0", result, [*before, align, *after])


@intrinsic
def prefetch(typingctx: Any, address: Any, offset: Any) -> Any:
    """Asks for the cache line at the address; any address is safe."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, b, sig, args, I8)
        read, keep, data = (ir.Constant(I32, v) for v in (0, 3, 1))
        call(b, "llvm.prefetch.p0", ir.VoidType(), [at, read, keep, data])
        return context.get_dummy_value()

    return types.void(address, offset), build


@intrinsic
def address_of(typingctx: Any, array: Any) -> Any:
    """Address of an array's first element; the caller keeps the array alive."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        return b.ptrtoint(data, I64)

    return types.int64(array), build
