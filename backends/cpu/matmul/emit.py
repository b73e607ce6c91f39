"""Building the unrolled inner loops of a matmul as LLVM IR.

Numba's front end takes milliseconds for every call in a function's source, so that an unrolled
tile of a few hundred vector operations would take seconds to compile. A tile is written here as
Python that runs once, while the kernel is built: `Value` has Python's operators, each of which
appends one instruction, and Python's loops unroll.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from localllm.backends.cpu.simd import Vector, intrinsic
from localllm.backends.cpu.simd.convert import f16_bits_to_f32
from localllm.backends.cpu.simd.lookup import lookup16
from localllm.backends.cpu.simd.vector import (
    ELEMENTS,
    I8,
    I32,
    I64,
    call,
    constant,
    lanes,
    overloaded,
    splat_ir,
)


class Value:
    """An LLVM vector, or a 64-bit integer (an address or an index)."""

    __slots__ = ("b", "ir")

    def __init__(self, b: Any, value: Any) -> None:
        self.b = b
        self.ir = value

    def __add__(self, other: Value | int) -> Value:
        return self._apply("fadd" if self.is_float else "add", other)

    def __sub__(self, other: Value | int) -> Value:
        return self._apply("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: Value | int) -> Value:
        return self._apply("fmul" if self.is_float else "mul", other)

    def __and__(self, other: Value | int) -> Value:
        return self._apply("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._apply("or_", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._apply("xor", other)

    def __lshift__(self, other: int) -> Value:
        return self._apply("shl", other)

    def __rshift__(self, other: int) -> Value:
        """Zeros come in from the left."""
        return self._apply("lshr", other)

    def shift_right_signed(self, bits: int) -> Value:
        return self._apply("ashr", bits)

    @property
    def lanes(self) -> int:
        return int(self.ir.type.count)

    @property
    def is_float(self) -> bool:
        return isinstance(getattr(self.ir.type, "element", self.ir.type), ir.FloatType)

    def _apply(self, instruction: str, other: Value | int) -> Value:
        operand = other.ir if isinstance(other, Value) else constant(self.ir.type, other)
        return Value(self.b, getattr(self.b, instruction)(self.ir, operand))


class Variable:
    """A value that changes in a loop; LLVM keeps it in a register."""

    def __init__(self, b: Any, initial: Value) -> None:
        self._b = b
        self._slot = cgutils.alloca_once(b, initial.ir.type)
        self.set(initial)

    def get(self) -> Value:
        return Value(self._b, self._b.load(self._slot))

    def set(self, value: Value) -> None:
        self._b.store(value.ir, self._slot)


class Emitter:
    """Appends instructions at the builder's place. Addresses are 64-bit integers."""

    def __init__(self, context: Any, b: Any) -> None:
        self.context = context
        self.b = b

    def integer(self, value: int) -> Value:
        return Value(self.b, ir.Constant(I64, value))

    def splat(self, kind: Vector, value: float) -> Value:
        return Value(self.b, constant(kind.ir, value))

    def load(self, kind: Vector, address: Value, offset: int = 0) -> Value:
        return Value(self.b, self.b.load(self._at(address, offset, kind.ir), align=1, typ=kind.ir))

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value.ir, self._at(address, offset, value.ir.type), align=1)

    def broadcast(self, kind: Vector, address: Value, offset: int = 0) -> Value:
        """The four bytes there, repeated over the whole vector."""
        word = self.b.load(self._at(address, offset, I32), align=1, typ=I32)
        count = kind.n * ELEMENT_BYTES[kind.elem] // 4
        return Value(self.b, self.b.bitcast(splat_ir(self.b, word, count), kind.ir))

    def prefetch(self, address: Value, offset: int) -> None:
        at = self._at(address, offset, I8)
        read, keep, data = (ir.Constant(I32, v) for v in (0, 3, 1))
        call(self.b, "llvm.prefetch.p0", ir.VoidType(), [at, read, keep, data])

    def lanes(self, x: Value, first: int, count: int) -> Value:
        return Value(self.b, lanes(self.b, x.ir, list(range(first, first + count))))

    def zero_extend(self, x: Value, element: str) -> Value:
        return Value(self.b, self.b.zext(x.ir, self._with(x, element)))

    def sign_extend(self, x: Value, element: str) -> Value:
        return Value(self.b, self.b.sext(x.ir, self._with(x, element)))

    def cast(self, x: Value, kind: Vector) -> Value:
        """The same bits as another vector type."""
        return Value(self.b, self.b.bitcast(x.ir, kind.ir))

    def to_f32(self, x: Value) -> Value:
        """Signed 32-bit integers, or float16 bits held in 16-bit lanes, as float32."""
        if x.ir.type.element.width == 16:
            return Value(self.b, f16_bits_to_f32(self.b, x.ir))
        return Value(self.b, self.b.sitofp(x.ir, self._with(x, "f32")))

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return Value(self.b, overloaded(self.b, "llvm.fma", x.ir, y.ir, z.ir))

    def quotient_up(self, x: Value, divisor: int) -> Value:
        """Of a 64-bit integer and a power of two."""
        return (x + (divisor - 1)) >> (divisor.bit_length() - 1)

    def minimum(self, x: Value, limit: int) -> Value:
        """Of signed integers."""
        other = constant(x.ir.type, limit)
        return Value(self.b, self.b.select(self.b.icmp_signed("<", x.ir, other), x.ir, other))

    def maximum(self, x: Value, y: Value) -> Value:
        """Of signed integers."""
        return Value(self.b, self.b.select(self.b.icmp_signed(">", x.ir, y.ir), x.ir, y.ir))

    def lookup(self, table: Sequence[int], index: Value) -> Value:
        """table[i] for each byte i of 0..15 of an i8x32; entries are of 0..255."""
        return Value(self.b, lookup16(self.b, table, index.ir))

    def variable(self, initial: Value) -> Variable:
        return Variable(self.b, initial)

    def buffer(self, size: int) -> Value:
        """Address of `size` bytes on the stack, 64-byte aligned."""
        slot = cgutils.alloca_once(self.b, ir.ArrayType(I8, size))
        slot.align = 64
        return Value(self.b, self.b.ptrtoint(slot, I64))

    @contextmanager
    def loop(self, count: Value | int) -> Iterator[Value]:
        """Runs the block for 0, 1, ... count - 1; a count of 1 makes no loop."""
        if count == 1:
            yield self.integer(0)
            return
        limit = count if isinstance(count, Value) else self.integer(count)
        with cgutils.for_range(self.b, limit.ir) as control:
            yield Value(self.b, control.index)

    def _at(self, address: Value, offset: int, kind: Any) -> Any:
        return self.b.inttoptr((address + offset).ir, kind.as_pointer())

    def _with(self, x: Value, element: str) -> Any:
        return ir.VectorType(ELEMENTS[element], x.ir.type.count)


ELEMENT_BYTES = {"i8": 1, "i16": 2, "i32": 4, "f16": 2, "f32": 4}


def routine(arity: int, write: Callable[..., None]) -> Any:
    """An intrinsic of `arity` int64 arguments whose body is `write(emitter, *values)`."""
    signature = types.void(*[types.int64] * arity)

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        write(Emitter(context, b), *(Value(b, a) for a in args))
        return context.get_dummy_value()

    if arity == 3:

        @intrinsic
        def three(typingctx: Any, a0: Any, a1: Any, a2: Any) -> Any:
            return signature, build

        return three

    @intrinsic
    def five(typingctx: Any, a0: Any, a1: Any, a2: Any, a3: Any, a4: Any) -> Any:
        return signature, build

    return five
