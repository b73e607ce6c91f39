"""The two inner loops of attention, on register tiles of a few rows by 16 lanes.

They are built as LLVM IR, one function for each number of rows up to MOST_ROWS, so that their sums
stay in registers and compiling them costs no type inference. Every sum is one chain of fused
multiply-adds in rising order, whose bits do not depend on how many rows share the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.simd import intrinsic
from localllm.backends.cpu.simd.convert import f16_bits_to_f32
from localllm.backends.cpu.simd.vector import (
    ELEMENTS,
    I8,
    I32,
    I64,
    call,
    f32x8,
    i16x8,
    overloaded,
    splat_ir,
)

PARTITION = 256  # positions
PARTITION_BLOCKS = PARTITION // BLOCK_TOKENS
FETCHED_BYTES = 32  # ahead of each step of an inner loop: what 16 float16 take
SCORE_BYTES = 4 * (PARTITION + 16)  # of a row; no power of two, lest rows share cache sets
TILE_LANES = 16
MOST_ROWS = 6  # by 2 vectors of sums: with what is added to them, AVX2's 16 registers

_VECTOR = 32  # bytes of eight float32


def _score_rows(element: str) -> Any:
    @intrinsic
    def score_rows(
        typingctx: Any, rows: Any, keys: Any, key_dim: Any, q: Any, to: Any, ahead: Any
    ) -> Any:
        """Scores of `rows` queries with a block's 16 keys: to[r] = sum of q[r, d] * keys[d].

        q is [rows, key_dim], rows of `to` are SCORE_BYTES apart. For each d of float16 keys, 32
        bytes are fetched into the caches from `ahead` on.
        """

        def body(b: Any, height: int, args: list[Any]) -> None:
            keys, key_dim, q, to, ahead = args

            def step(d: Any, sums: list[Any]) -> list[Any]:
                if element == "f16":
                    _prefetch(b, _offset(b, ahead, d, FETCHED_BYTES))
                vectors = _load_row(b, element, _offset(b, keys, d, _row_bytes(element)))
                factors = _offset(b, q, d, 4)
                return _add_outer(b, sums, vectors, factors, b.mul(key_dim, _word(4)))

            sums = _loop(b, _word(0), key_dim, [_zeros()] * (2 * height), step)
            for total, pointer in zip(sums, _tile(b, height, to, _word(SCORE_BYTES)), strict=True):
                b.store(total, pointer, align=4)

        return types.void(*[types.int64] * 6), _switch(f"attention_score_{element}", body)

    return score_rows


def _add_values(element: str) -> Any:
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
        """sums[r, 0:16] += weights[r, t] * values[t, 0:16] for positions t from first to last.

        Rows of `weights` are SCORE_BYTES apart, those of `sums` and `values` as many as given.
        `blocks` lists the addresses of the partition's blocks, whose values start `offset` behind
        them, and then of the next one's: from `ahead` behind those on, 32 bytes are fetched into
        the caches for each position of float16 values.
        """

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
                        _prefetch(b, _offset(b, fetched, position, FETCHED_BYTES))
                    row = b.add(values, b.mul(position, value_bytes))
                    factors = _offset(b, weights, t, 4)
                    vectors = _load_row(b, element, row)
                    return _add_outer(b, sums, vectors, factors, _word(SCORE_BYTES))

                low = _larger(b, first, start)
                high = _smaller(b, last, b.add(start, _word(BLOCK_TOKENS)))
                return _loop(b, low, high, sums, step)

            end_block = b.udiv(b.add(last, _word(BLOCK_TOKENS - 1)), _word(BLOCK_TOKENS))
            pointers = _tile(b, height, to, to_bytes)
            before = [b.load(pointer, align=4) for pointer in pointers]
            after = _loop(b, b.udiv(first, _word(BLOCK_TOKENS)), end_block, before, add_block)
            for total, pointer in zip(after, pointers, strict=True):
                b.store(total, pointer, align=4)

        return types.void(*[types.int64] * 10), _switch(f"attention_values_{element}", body)

    return add_values


score_rows_f16, score_rows_f32 = _score_rows("f16"), _score_rows("f32")
add_values_f16, add_values_f32 = _add_values("f16"), _add_values("f32")


def _switch(name: str, body: Callable[[Any, int, list[Any]], None]) -> Callable[..., Any]:
    """An intrinsic's code: calls the function for as many rows as its first argument says."""

    def generate(context: Any, b: Any, sig: Any, args: Any) -> Any:
        end = b.append_basic_block(name)
        switch = b.switch(args[0], end)
        for height in range(1, MOST_ROWS + 1):
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


def _add_outer(b: Any, sums: list[Any], halves: list[Any], factors: Any, step: Any) -> list[Any]:
    """Adds each row's factor times the two vectors; factors are `step` bytes apart."""
    result = []
    for row in range(len(sums) // 2):
        at = b.inttoptr(b.add(factors, b.mul(step, _word(row))), ELEMENTS["f32"].as_pointer())
        factor = splat_ir(b, b.load(at, align=4), f32x8.n)
        for i, half in enumerate(halves):
            result.append(overloaded(b, "llvm.fma", half, factor, sums[2 * row + i]))
    return result


def _row_bytes(element: str) -> int:
    return TILE_LANES * (2 if element == "f16" else 4)


def _load_row(b: Any, element: str, address: Any) -> list[Any]:
    """16 numbers as two vectors of float32."""
    addresses = [address, b.add(address, _word(_row_bytes(element) // 2))]
    if element == "f32":
        return [b.load(b.inttoptr(a, f32x8.ir.as_pointer()), align=4) for a in addresses]
    kind = i16x8.ir.as_pointer()
    return [f16_bits_to_f32(b, b.load(b.inttoptr(a, kind), align=2)) for a in addresses]


def _tile(b: Any, rows: int, address: Any, row_bytes: Any) -> list[Any]:
    """Pointers to the two vectors of each row."""
    starts = [b.add(address, b.mul(row_bytes, _word(row))) for row in range(rows)]
    kind = f32x8.ir.as_pointer()
    return [b.inttoptr(b.add(at, _word(i * _VECTOR)), kind) for at in starts for i in range(2)]


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


def _zeros() -> Any:
    return ir.Constant(f32x8.ir, None)
