"""Register tiles of attention: the sums of a few rows by 16 lanes, and what adds to them.

A tile is a tuple of vectors, two for each row, which LLVM keeps in registers across a loop. Every
sum is one chain of fused multiply-adds in the loop's order, so its bits do not depend on how many
rows share the tile.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils

from localllm.backends.cpu.simd import f32x8, intrinsic
from localllm.backends.cpu.simd.vector import ELEMENTS, I8, I64, overloaded, splat_ir

TILE_LANES = 16  # two vectors
_VECTOR_BYTES = 32


def _at(b: Any, address: Any, row: int, row_bytes: Any, byte: int, element: Any) -> Any:
    """Pointer to `byte` of a row of a matrix at `address`."""
    offset = b.add(b.mul(row_bytes, ir.Constant(I64, row)), ir.Constant(I64, byte))
    start = b.inttoptr(address, I8.as_pointer())
    return b.bitcast(b.gep(start, [offset], source_etype=I8), element.as_pointer())


def _zeros(rows: int) -> Any:
    @intrinsic
    def zeros(typingctx: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            zero = ir.Constant(f32x8.ir, None)
            return cgutils.pack_array(b, [zero] * (2 * rows))

        return types.UniTuple(f32x8, 2 * rows)(), build

    return zeros


zeros_1, zeros_2, zeros_3, zeros_4, zeros_6 = map(_zeros, (1, 2, 3, 4, 6))


@intrinsic
def load_tile(typingctx: Any, like: Any, address: Any, row_bytes: Any) -> Any:
    """A tile of as many rows as `like`, from 16 columns of a float32 matrix."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vectors = [
            b.load(_at(b, args[1], i // 2, args[2], i % 2 * _VECTOR_BYTES, f32x8.ir), align=4)
            for i in range(like.count)
        ]
        return cgutils.pack_array(b, vectors)

    return like(like, types.int64, types.int64), build


@intrinsic
def store_tile(typingctx: Any, tile: Any, address: Any, row_bytes: Any) -> Any:
    """Stores a tile into 16 columns of a float32 matrix."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i, vector in enumerate(cgutils.unpack_tuple(b, args[0], tile.count)):
            to = _at(b, args[1], i // 2, args[2], i % 2 * _VECTOR_BYTES, f32x8.ir)
            b.store(vector, to, align=4)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), build


@intrinsic
def add_outer(
    typingctx: Any, tile: Any, low: Any, high: Any, factors: Any, factor_bytes: Any
) -> Any:
    """tile[r] += factor[r] * (low, high), with one float32 factor every `factor_bytes` bytes."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        sums = cgutils.unpack_tuple(b, args[0], tile.count)
        result = []
        for r in range(tile.count // 2):
            factor = b.load(_at(b, args[3], r, args[4], 0, ELEMENTS["f32"]), align=4)
            factor = splat_ir(b, factor, f32x8.n)
            result += [
                overloaded(b, "llvm.fma", vector, factor, sums[2 * r + i])
                for i, vector in enumerate(args[1:3])
            ]
        return cgutils.pack_array(b, result)

    return tile(tile, f32x8, f32x8, types.int64, types.int64), build
