"""Operations on whole rows: the selection of those that need logits, scaling by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from localllm.backends.cpu.kernel import (
    H_LOGIT_ROW_IDS,
    H_LOGIT_ROWS,
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
    lanes_below,
    load_f32x8,
    load_masked_f32x8,
    scalar_load_i32,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
)


@dataclass(frozen=True)
class RowsArgs(Arguments):
    """Words of the kernels here; `select_rows` reads the first five."""

    out: int
    out_stride: int
    width: int
    x: int
    x_stride: int
    beta: float = 0.0
    floor_scale: float = 1.0
    offset: float = 0.0


_OUT, _OUT_STRIDE, _WIDTH, _X, _X_STRIDE, _BETA, _FLOOR_SCALE, _OFFSET = range(
    FIRST_WORD, FIRST_WORD + 8
)


@helper
def _scale_row(out: int, x: int, n: int, scale: np.float32) -> None:
    factor = splat_f32x8(scale)
    whole = n // 8 * 8
    for at in range(0, whole * 4, 32):
        store_f32x8(out, at, load_f32x8(x, at) * factor)
    if whole < n:
        mask = lanes_below(n - whole)
        rest = load_masked_f32x8(x, whole * 4, mask) * factor
        store_masked_f32x8(out, whole * 4, rest, mask)


@kernel
def select_rows(args: int, tid: int, n: int) -> None:
    """out[r] = x[logit_rows[r]]."""
    head = header(args)
    rows = arg_i64(head, H_LOGIT_ROWS)
    row = claim(args, 1)
    while row < rows:
        source = scalar_load_i32(arg_i64(head, H_LOGIT_ROW_IDS), row * 4)
        _scale_row(
            arg_i64(args, _OUT) + row * arg_i64(args, _OUT_STRIDE) * 4,
            arg_i64(args, _X) + source * arg_i64(args, _X_STRIDE) * 4,
            arg_i64(args, _WIDTH),
            np.float32(1.0),
        )
        row = claim(args, 1)


@kernel
def position_scale(args: int, tid: int, n: int) -> None:
    """out[t] = x[t] * (1 + beta * log(1 + floor((position[t] + offset) / floor_scale)))."""
    head = header(args)
    tokens = arg_i64(head, H_TOKENS)
    token = claim(args, 1)
    while token < tokens:
        position = scalar_load_i32(arg_i64(head, H_POSITIONS), token * 4)
        steps = math.floor((position + arg_f32(args, _OFFSET)) / arg_f32(args, _FLOOR_SCALE))
        _scale_row(
            arg_i64(args, _OUT) + token * arg_i64(args, _OUT_STRIDE) * 4,
            arg_i64(args, _X) + token * arg_i64(args, _X_STRIDE) * 4,
            arg_i64(args, _WIDTH),
            np.float32(1.0 + arg_f32(args, _BETA) * math.log(1.0 + steps)),
        )
        token = claim(args, 1)
