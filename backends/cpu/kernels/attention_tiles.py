"""The two inner loops of attention, on register tiles of a few rows by one or two vectors.

They are built as LLVM IR, one function for each size of a tile, so that their sums stay in
registers and compiling them costs no type inference. A vector is 16 float32, one register of
AVX-512 or two of AVX2. Every sum is one chain of fused multiply-adds in rising order, whose bits
do not depend on what else is in the tile.

Each loop is a kernel of its own that `attend` calls by its address: part of `attend`, all these
functions would be compiled again for each of the functions that the call is nested in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
from numba import types

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu import target
from localllm.backends.cpu.kernel import Kernel, arg_i64, kernel, kernel_factory
from localllm.backends.cpu.simd import intrinsic
from localllm.backends.cpu.simd.convert import f16_bits_to_f32
from localllm.backends.cpu.simd.vector import (
    ELEMENTS,
    I8,
    I32,
    I64,
    Vector,
    call,
    f32x16,
    overloaded,
    splat_ir,
)

PARTITION = 256  # positions
PARTITION_BLOCKS = PARTITION // BLOCK_TOKENS
FETCHED_BYTES = 32  # ahead of each step of an inner loop: what 16 float16 take
SCORE_BYTES = 4 * (PARTITION + 16)  # of a row; no power of two, lest rows share cache sets
LANES = BLOCK_TOKENS  # float32 in a vector: the scores of one block


@dataclass(frozen=True)
class TileShape:
    """Sizes that keep a tile's sums, and what is added to them, in registers."""

    vectors: int  # of a row
    rows: int  # of a tile over widened keys or values; two thirds and a third of that exist too
    few: int  # rows over float16; more are worth widening keys and values for all of them

    @property
    def row_step(self) -> int:
        """Heights of tiles over widened keys or values are multiples of this."""
        return self.rows // 3


def tile_shape() -> TileShape:
    """Of the instruction set in use."""
    if target.current() == "avx512":
        return TileShape(vectors=2, rows=12, few=8)
    return TileShape(vectors=1, rows=6, few=6)


def _size(name: str) -> Any:
    """A number of `tile_shape()` as a constant of compiled code."""

    @intrinsic
    def size(typingctx: Any) -> Any:
        def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return _word(getattr(tile_shape(), name))

        return types.int64(), build

    return size


tile_vectors, most_rows, row_step, few_rows = map(_size, ("vectors", "rows", "row_step", "few"))


def _score_rows(element: str) -> Any:
    @intrinsic
    def score_rows(
        typingctx: Any, rows: Any, keys: Any, key_dim: Any, q: Any, to: Any, ahead: Any
    ) -> Any:
        """Scores of `rows` queries with the keys of as many blocks as a tile has vectors.

        to[r] = sum of q[r, d] * keys[d]; q is [rows, key_dim], rows of `to` are SCORE_BYTES apart.
        `keys` lists the addresses of the blocks' keys; float32 keys of neighbours alternate. For
        each d of float16 keys, 32 bytes are fetched into the caches from `ahead` behind them on.
        """
        vectors = tile_shape().vectors

        def body(b: Any, height: int, args: list[Any]) -> None:
            listed, key_dim, q, to, ahead = args
            keys = [_load_word(b, b.add(listed, _word(8 * v))) for v in range(vectors)]
            step_bytes = _vector_bytes(element) * (vectors if element == "f32" else 1)

            def step(d: Any, sums: list[Any]) -> list[Any]:
                at = [_offset(b, block, d, step_bytes) for block in keys]
                if element == "f16":
                    for address in at:
                        _prefetch(b, b.add(address, ahead))
                row = [_load_vector(b, element, address) for address in at]
                return _add_outer(b, sums, row, _offset(b, q, d, 4), b.mul(key_dim, _word(4)))

            zeros = [ir.Constant(f32x16.ir, None)] * (vectors * height)
            sums = _loop(b, _word(0), key_dim, zeros, step)
            pointers = _tile(b, height, vectors, to, _word(SCORE_BYTES))
            for total, pointer in zip(sums, pointers, strict=True):
                b.store(total, pointer, align=4)

        name = f"attention_score_{element}_{vectors}"
        return types.void(*[types.int64] * 6), _switch(name, _heights(element), body)

    return score_rows


def _add_values(element: str, wide: bool) -> Any:
    @intrinsic
    def add_values(
        typingctx: Any,
        rows: Any,
        sums: Any,
        sums_bytes: Any,
        weights: Any,
        first: Any,
        last: Any,
        blocks: Any,
        offset: Any,
        value_bytes: Any,
        ahead: Any,
    ) -> Any:
        """sums[r] += weights[r, t] * values[t] for positions t from first to last.

        Of values and sums, one vector is taken, or as many as a tile has. Rows of `weights` are
        SCORE_BYTES apart, those of `sums` and `values` as many as given. `blocks` lists the
        addresses of the partition's blocks, whose values start `offset` behind them, and then of
        the next one's: from `ahead` behind those on, as many bytes are fetched into the caches for
        each position as its float16 values take.
        """
        vectors = tile_shape().vectors if wide else 1

        def body(b: Any, height: int, args: list[Any]) -> None:
            to, to_bytes, weights, first, last, blocks, offset, value_bytes, ahead = args

            def add_block(block: Any, sums: list[Any]) -> list[Any]:
                start = b.mul(block, _word(BLOCK_TOKENS))
                listed = _offset(b, blocks, block, 8)
                values = b.add(_load_word(b, listed), offset)
                following = _load_word(b, b.add(listed, _word(8 * PARTITION_BLOCKS)))
                fetched = b.add(following, ahead)

                def step(t: Any, sums: list[Any]) -> list[Any]:
                    position = b.sub(t, start)
                    if element == "f16":
                        _prefetch(b, _offset(b, fetched, position, FETCHED_BYTES * vectors))
                    row = b.add(values, b.mul(position, value_bytes))
                    at = [b.add(row, _word(v * _vector_bytes(element))) for v in range(vectors)]
                    loaded = [_load_vector(b, element, address) for address in at]
                    factors = _offset(b, weights, t, 4)
                    return _add_outer(b, sums, loaded, factors, _word(SCORE_BYTES))

                low = _larger(b, first, start)
                high = _smaller(b, last, b.add(start, _word(BLOCK_TOKENS)))
                return _loop(b, low, high, sums, step)

            end_block = b.udiv(b.add(last, _word(BLOCK_TOKENS - 1)), _word(BLOCK_TOKENS))
            pointers = _tile(b, height, vectors, to, to_bytes)
            before = [b.load(pointer, align=4) for pointer in pointers]
            after = _loop(b, b.udiv(first, _word(BLOCK_TOKENS)), end_block, before, add_block)
            for total, pointer in zip(after, pointers, strict=True):
                b.store(total, pointer, align=4)

        name = f"attention_values_{element}_{vectors}"
        return types.void(*[types.int64] * 10), _switch(name, _heights(element), body)

    return add_values


@kernel_factory
def score_kernel(element: str) -> Kernel:
    """Called with words 0.. for the arguments of `score_rows` after the first, and with `rows`."""
    score_rows = _score_rows(element)

    @kernel
    def run(words: int, rows: int, _n: int) -> None:
        score_rows(
            rows,
            arg_i64(words, 0),
            arg_i64(words, 1),
            arg_i64(words, 2),
            arg_i64(words, 3),
            arg_i64(words, 4),
        )

    return run


@kernel_factory
def value_kernel(element: str, wide: bool) -> Kernel:
    """Called with words 0.. for the arguments of `add_values` after the first, and with `rows`."""
    add_values = _add_values(element, wide)

    @kernel
    def run(words: int, rows: int, _n: int) -> None:
        add_values(
            rows,
            arg_i64(words, 0),
            arg_i64(words, 1),
            arg_i64(words, 2),
            arg_i64(words, 3),
            arg_i64(words, 4),
            arg_i64(words, 5),
            arg_i64(words, 6),
            arg_i64(words, 7),
            arg_i64(words, 8),
        )

    return run


CALL_WORDS = 9  # at most


def _heights(element: str) -> range:
    shape = tile_shape()
    if element == "f16":
        return range(1, shape.few + 1)
    return range(shape.row_step, shape.rows + 1, shape.row_step)


def _switch(
    name: str, heights: range, body: Callable[[Any, int, list[Any]], None]
) -> Callable[..., Any]:
    """An intrinsic's code: calls the function for as many rows as its first argument says."""

    def generate(context: Any, b: Any, sig: Any, args: Any) -> Any:
        end = b.append_basic_block(name)
        switch = b.switch(args[0], end)
        for height in heights:
            case = b.append_basic_block(f"{name}_{height}")
            switch.add_case(_word(height), case)
            b.position_at_end(case)
            b.call(_function(b.module, f"{name}_{height}", height, len(args) - 1, body), args[1:])
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return generate


def _function(
    module: Any, name: str, height: int, n_args: int, body: Callable[[Any, int, list[Any]], None]
) -> Any:
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n_args), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block())
    body(b, height, list(function.args))
    b.ret_void()
    return function


def _loop(
    b: Any, first: Any, last: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for i in range(first, last): values = step(i, values); values are kept in registers."""
    before = b.block
    head, inside, after = (b.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    values = [b.phi(value.type) for value in start]
    b.cbranch(b.icmp_signed("<", i, last), inside, after)
    b.position_at_end(inside)
    results = step(i, values)
    following = b.add(i, _word(1))
    for phi, initial, result in zip(
        [i, *values], [first, *start], [following, *results], strict=True
    ):
        phi.add_incoming(initial, before)
        phi.add_incoming(result, b.block)
    b.branch(head)
    b.position_at_end(after)
    return values


def _add_outer(b: Any, sums: list[Any], row: list[Any], factors: Any, step: Any) -> list[Any]:
    """Adds each factor times the row's vectors to its sums; factors are `step` bytes apart."""
    result = []
    for at in range(len(sums) // len(row)):
        pointer = b.inttoptr(b.add(factors, b.mul(step, _word(at))), ELEMENTS["f32"].as_pointer())
        factor = splat_ir(b, b.load(pointer, align=4), LANES)
        for i, vector in enumerate(row):
            result.append(overloaded(b, "llvm.fma", vector, factor, sums[len(row) * at + i]))
    return result


def _vector_bytes(element: str) -> int:
    return LANES * (2 if element == "f16" else 4)


def _load_vector(b: Any, element: str, address: Any) -> Any:
    if element == "f32":
        return b.load(b.inttoptr(address, f32x16.ir.as_pointer()), align=4)
    bits = b.load(b.inttoptr(address, Vector("i16", LANES).ir.as_pointer()), align=2)
    return f16_bits_to_f32(b, bits)


def _tile(b: Any, rows: int, vectors: int, address: Any, row_bytes: Any) -> list[Any]:
    """Pointers to the vectors of each row."""
    starts = [b.add(address, b.mul(row_bytes, _word(row))) for row in range(rows)]
    kind, size = f32x16.ir.as_pointer(), _vector_bytes("f32")
    return [b.inttoptr(b.add(at, _word(v * size)), kind) for at in starts for v in range(vectors)]


def _prefetch(b: Any, address: Any) -> None:
    pointer = b.inttoptr(address, I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *(ir.Constant(I32, v) for v in (0, 3, 1))])


def _load_word(b: Any, address: Any) -> Any:
    return b.load(b.inttoptr(address, I64.as_pointer()))


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _smaller(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), x, y)


def _offset(b: Any, address: Any, index: Any, size: int) -> Any:
    return b.add(address, b.mul(index, _word(size)))


def _word(value: int) -> Any:
    return ir.Constant(I64, value)
