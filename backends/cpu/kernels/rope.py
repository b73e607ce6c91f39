"""Rotary positions: a step's cosines and sines once per table, then the rotation of q and k.

A step's table holds, for each token, a factor for each rotated dimension itself and then one for
its partner, sign included, so that both pairings rotate by the same two products:
out[i] = x[i] * own[i] + x[partner(i)] * other[i].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from localllm.backends.cpu.kernel import (
    H_POSITIONS,
    H_TOKENS,
    arg_f32,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.simd import (
    f32x8,
    fma,
    intrinsic,
    lanes_below,
    load_masked_f32x8,
    scalar_load_f64,
    scalar_load_i32,
    scalar_store_f32,
    store_masked_f32x8,
)
from localllm.backends.cpu.simd.vector import lanes


def table_floats(pairs: int) -> int:
    """float32 entries of one token's row of a step's table."""
    return 4 * pairs


@dataclass(frozen=True)
class RopeTableArgs(Arguments):
    """Words of `rope_table`, which fills float32 `out` [T, table_floats(pairs)]."""

    inv_freq: int  # float64 [pairs]
    pairs: int
    scale: float
    interleaved: bool
    out: int


@dataclass(frozen=True)
class RopeArgs(Arguments):
    """Words of `rope`, which rotates each head of x [T, heads * head_dim] into out.

    The 2 * pairs leading dimensions of a head rotate, the rest is copied.
    """

    x: int
    x_stride: int
    out: int
    out_stride: int
    heads: int
    head_dim: int
    pairs: int
    interleaved: bool
    table: int  # filled by `rope_table`


_FREQ, _PAIRS, _SCALE, _INTERLEAVED, _TABLE_OUT = range(FIRST_WORD, FIRST_WORD + 5)
_X, _X_STRIDE, _OUT, _OUT_STRIDE, _HEADS, _HEAD_DIM, _R_PAIRS, _R_INTERLEAVED, _TABLE = range(
    FIRST_WORD, FIRST_WORD + 9
)
_MOST_ROWS = 16  # per claim


@helper
def _rows_per_claim(tokens: int, nthreads: int) -> int:
    return max(1, min(_MOST_ROWS, tokens // (4 * nthreads)))


@kernel
def rope_table(args: int, tid: int, nthreads: int) -> None:
    """Angles are position * inv_freq in float64; their cosines and sines, scaled, in float32."""
    head = header(args)
    tokens, positions = arg_i64(head, H_TOKENS), arg_i64(head, H_POSITIONS)
    pairs = arg_i64(args, _PAIRS)
    chunk = _rows_per_claim(tokens, nthreads)
    first = claim(args, chunk)
    while first < tokens:
        for token in range(first, min(first + chunk, tokens)):
            position = scalar_load_i32(positions, token * 4)
            row = arg_i64(args, _TABLE_OUT) + token * pairs * 16
            _table_row(args, position, row)
        first = claim(args, chunk)


@helper
def _table_row(args: int, position: int, own: int) -> None:
    pairs, scale = arg_i64(args, _PAIRS), arg_f32(args, _SCALE)
    inv_freq = arg_i64(args, _FREQ)
    interleaved = arg_i64(args, _INTERLEAVED) != 0
    other = own + pairs * 8
    for j in range(pairs):
        angle = position * scalar_load_f64(inv_freq, j * 8)
        cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
        first, second = (8 * j, 8 * j + 4) if interleaved else (4 * j, 4 * (j + pairs))
        scalar_store_f32(own, first, cos)
        scalar_store_f32(own, second, cos)
        scalar_store_f32(other, first, -sin)
        scalar_store_f32(other, second, sin)


@kernel
def rope(args: int, tid: int, nthreads: int) -> None:
    """Rotates every head of x by the step's table."""
    tokens = arg_i64(header(args), H_TOKENS)
    head_bytes = arg_i64(args, _HEAD_DIM) * 4
    row_bytes = arg_i64(args, _R_PAIRS) * 16
    chunk = _rows_per_claim(tokens, nthreads)
    first = claim(args, chunk)
    while first < tokens:
        for token in range(first, min(first + chunk, tokens)):
            x = arg_i64(args, _X) + token * arg_i64(args, _X_STRIDE) * 4
            out = arg_i64(args, _OUT) + token * arg_i64(args, _OUT_STRIDE) * 4
            table = arg_i64(args, _TABLE) + token * row_bytes
            for _ in range(arg_i64(args, _HEADS)):
                rotate_head(
                    x,
                    out,
                    table,
                    arg_i64(args, _R_PAIRS),
                    arg_i64(args, _HEAD_DIM),
                    arg_i64(args, _R_INTERLEAVED),
                )
                x += head_bytes
                out += head_bytes
        first = claim(args, chunk)


@helper
def rotate_head(x: int, out: int, own: int, pairs: int, head_dim: int, interleaved: int) -> None:
    """Rotates one head by a token's row `own` of the step's table."""
    rotated = 2 * pairs
    other = own + rotated * 4
    if interleaved != 0:
        for i in range(0, rotated, 8):
            mask = lanes_below(rotated - i)
            values = load_masked_f32x8(x, i * 4, mask)
            partners = _swap_neighbours(values)
            _rotate(values, partners, own, other, out, i, mask)
    else:
        for i in range(0, pairs, 8):
            mask = lanes_below(pairs - i)
            low = load_masked_f32x8(x, i * 4, mask)
            high = load_masked_f32x8(x, (i + pairs) * 4, mask)
            _rotate(low, high, own, other, out, i, mask)
            _rotate(high, low, own, other, out, i + pairs, mask)
    for i in range(rotated, head_dim, 8):
        mask = lanes_below(head_dim - i)
        store_masked_f32x8(out, i * 4, load_masked_f32x8(x, i * 4, mask), mask)


@helper
def _rotate(x: Any, partners: Any, own: int, other: int, out: int, i: int, mask: Any) -> None:
    turned = partners * load_masked_f32x8(other, i * 4, mask)
    result = fma(x, load_masked_f32x8(own, i * 4, mask), turned)
    store_masked_f32x8(out, i * 4, result, mask)


@intrinsic
def _swap_neighbours(typingctx: Any, x: Any) -> Any:
    """Lanes 1, 0, 3, 2, 5, 4, 7, 6."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return lanes(b, args[0], [1, 0, 3, 2, 5, 4, 7, 6])

    return f32x8(f32x8), build
