"""Two ways to sum products of unsigned weights and signed activations. Both are exact.

A *chain* is a running sum over groups of four neighbouring k; `flush` scales it and adds it to
the block's total, one i32 for each row.
"""

from __future__ import annotations

from typing import Protocol

from localllm.backends.cpu import target
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.simd import Vector
from localllm.backends.cpu.simd.dot import dot2_i16, dot2_u8i8, dot4_u8i8


class Dots(Protocol):
    limits_chains: bool  # whether a chain may not exceed the format's `chain` groups

    def scale(self, scale: Value) -> Value:
        """The form in which `flush` takes scales that are given as one i32 for each row."""

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        """The chain with one more group; None is the empty chain."""

    def flush(self, e: Emitter, total: Value, chain: Value, scale: Value | int) -> Value:
        """total + scale * chain."""


class PairSums:
    """Sums of two in int16 lanes (vpmaddubsw), as many of them as fit before they are widened."""

    limits_chains = True

    def scale(self, scale: Value) -> Value:
        return (scale & 0xFFFF) | (scale << 16)

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        sums = Value(e.b, dot2_u8i8(e.b, weights.ir, activations.ir))
        return sums if chain is None else chain + sums

    def flush(self, e: Emitter, total: Value, chain: Value, scale: Value | int) -> Value:
        pairs = Vector("i16", chain.lanes)
        factor = e.splat(pairs, scale) if isinstance(scale, int) else e.cast(scale, pairs)
        return total + dot_pairs(e, chain, factor)


class FourWay:
    """Sums of four in int32 lanes (vpdpbusd)."""

    limits_chains = False

    def scale(self, scale: Value) -> Value:
        return scale

    def add(self, e: Emitter, chain: Value | None, weights: Value, activations: Value) -> Value:
        if chain is None:
            chain = e.splat(Vector("i32", weights.lanes // 4), 0)
        return Value(e.b, dot4_u8i8(e.b, chain.ir, weights.ir, activations.ir))

    def flush(self, e: Emitter, total: Value, chain: Value, scale: Value | int) -> Value:
        return total + chain * scale


def dots() -> Dots:
    """The way of this process's instruction set."""
    return FourWay() if target.current() in ("vnni", "avx512") else PairSums()


def dot_pairs(e: Emitter, x: Value, y: Value) -> Value:
    """i16 lanes to half as many i32: products, neighbours added."""
    return Value(e.b, dot2_i16(e.b, x.ir, y.ir))
