"""Ways to sum products of unsigned weights and signed activations. All are exact.

A *chain* is a running sum over groups of four neighbouring k; `flush` scales it and adds it to
the block's total, one i32 for each row. Weights are below 128 but for whole bytes, which not all
ways can take as they are: `byte_parts` says what they are multiplied as.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from localllm.backends.cpu import target
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.simd import Vector
from localllm.backends.cpu.simd.dot import add_dot2_i16, dot2_i16, dot2_u8i8, dot4_i8i8, dot4_u8i8

Byte = TypeVar("Byte", Value, int)


class Dots(Protocol):
    limits_chains: bool  # whether a chain may not exceed the format's `chain` groups
    byte_excess_bits: int | None  # whole bytes are given 2**bits larger than their number

    def byte_parts(self, byte: Byte) -> tuple[Byte, ...]:
        """A byte that is 128 larger than its number, in parts: part i counts 16**i times."""

    def scale(self, scale: Value) -> Value:
        """The form in which `flush` takes scales that are given as one i32 for each row."""

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        """The chain with one more group; None is the empty chain."""

    def flush(
        self, e: Emitter, total: Value, chain: Value, scale: Value | int, narrow: bool = False
    ) -> Value:
        """total + scale * chain. A narrow chain's sums of four fit 16 bits."""

    def add_pairs(self, e: Emitter, total: Value, x: Value, y: Value) -> Value:
        """total + the products of i16 lanes, neighbours added."""


class PairSums:
    """Sums of two in int16 lanes (vpmaddubsw), as many of them as fit before they are widened."""

    limits_chains = True
    byte_excess_bits: int | None = 7

    def byte_parts(self, byte: Byte) -> tuple[Byte, ...]:
        """Nibbles: products of whole bytes do not fit."""
        return byte & 15, byte >> 4

    def scale(self, scale: Value) -> Value:
        return (scale & 0xFFFF) | (scale << 16)

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        sums = Value(e.b, dot2_u8i8(e.b, weights.ir, activations.ir))
        return sums if chain is None else chain + sums

    def flush(
        self, e: Emitter, total: Value, chain: Value, scale: Value | int, narrow: bool = False
    ) -> Value:
        pairs = Vector("i16", chain.lanes)
        factor = e.splat(pairs, scale) if isinstance(scale, int) else e.cast(scale, pairs)
        return self.add_pairs(e, total, chain, factor)

    def add_pairs(self, e: Emitter, total: Value, x: Value, y: Value) -> Value:
        return total + Value(e.b, dot2_i16(e.b, x.ir, y.ir))


class FourWay:
    """Sums of four in int32 lanes (vpdpbusd, usdot)."""

    limits_chains = False
    byte_excess_bits: int | None = 7

    def byte_parts(self, byte: Byte) -> tuple[Byte, ...]:
        return (byte,)

    def scale(self, scale: Value) -> Value:
        return scale

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        if chain is None:
            chain = e.splat(Vector("i32", weights.lanes // 4), 0)
        return self._dot(e, chain, weights, activations)

    def flush(
        self, e: Emitter, total: Value, chain: Value, scale: Value | int, narrow: bool = False
    ) -> Value:
        if narrow and isinstance(scale, Value) and target.is_x86():
            # Products of 16 bits take a third of the time; those of the upper halves are zero.
            pairs = Vector("i16", 2 * chain.lanes)
            return self.add_pairs(e, total, e.cast(chain, pairs), e.cast(scale & 0xFFFF, pairs))
        return total + chain * scale

    def add_pairs(self, e: Emitter, total: Value, x: Value, y: Value) -> Value:
        if target.is_x86():  # vpdpwssd
            return Value(e.b, add_dot2_i16(e.b, total.ir, x.ir, y.ir))
        return total + Value(e.b, dot2_i16(e.b, x.ir, y.ir))

    def _dot(self, e: Emitter, chain: Value, weights: Value, activations: Value) -> Value:
        return Value(e.b, dot4_u8i8(e.b, chain.ir, weights.ir, activations.ir))


class SignedFourWay(FourWay):
    """The same where weights are signed too (sdot)."""

    byte_excess_bits: int | None = None

    def byte_parts(self, byte: Byte) -> tuple[Byte, ...]:
        return (byte ^ 0x80,)

    def _dot(self, e: Emitter, chain: Value, weights: Value, activations: Value) -> Value:
        return Value(e.b, dot4_i8i8(e.b, chain.ir, weights.ir, activations.ir))


_WAYS: dict[str, type[Dots]] = {
    "avx512": FourWay,
    "vnni": FourWay,
    "avx2": PairSums,
    "i8mm": FourWay,
    "dotprod": SignedFourWay,
    "scalar": PairSums,
}


def dots() -> Dots:
    """The way of this process's instruction set."""
    return _WAYS[target.current()]()
