"""Mixture of experts: which tokens go to which experts, and how the experts' answers are summed.

`route` picks each row's experts, `order_by_expert` lays the chosen (row, expert) pairs out expert
by expert as rows of a panel for the segmented matmuls, `combine_experts` sums the answers. A
row's experts, weights and sum depend on no other row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from localllm.backends.cpu.kernel import (
    arg_f32,
    arg_i64,
    claim,
    helper,
    kernel,
    row_count,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.simd import (
    broadcast_f32x8,
    fma,
    lanes_below,
    load_masked_f32x8,
    scalar_load_f32,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f32,
    scalar_store_i32,
    scalar_store_i64,
    splat_f32x8,
    store_masked_f32x8,
)

SOFTMAX, SIGMOID = 0, 1


@dataclass(frozen=True)
class RouteArgs(Arguments):
    """Words of `route`. logits is float32 [rows, experts]; experts at most MAX_EXPERTS."""

    logits: int
    logits_stride: int
    row_kind: int
    experts: int
    used: int
    gating: int  # SOFTMAX or SIGMOID
    normalize: bool
    scale: float
    expert: int  # out, int32 [rows, used]: a row's experts in order of falling weight
    weight: int  # out, float32 [rows, used]
    scratch: int  # float32 [threads, experts]


@dataclass(frozen=True)
class OrderArgs(Arguments):
    """Words of `order_by_expert`; panel rows are sorted by expert, then by row."""

    row_kind: int
    experts: int
    used: int
    expert: int  # from `route`
    gather: int  # out, int32 [rows * used]: the row that a panel row is a copy of
    segment_start: int  # out, int64 [experts + 1]: an expert's range of panel rows
    position: int  # out, int32 [rows, used]: the panel row of a row's j-th expert


@dataclass(frozen=True)
class CombineArgs(Arguments):
    """Words of `combine_experts`: out[r] = sum over j of weight[r, j] * y[position[r, j]]."""

    y: int  # float32 [rows * used, width], the experts' answers by panel row
    y_stride: int
    row_kind: int
    used: int
    weight: int
    position: int
    out: int
    out_stride: int
    width: int


(
    _LOGITS,
    _LOGITS_STRIDE,
    _ROW_KIND,
    _EXPERTS,
    _USED,
    _GATING,
    _NORMALIZE,
    _SCALE,
    _EXPERT,
    _WEIGHT,
    _SCRATCH,
) = range(FIRST_WORD, FIRST_WORD + 11)
(
    _O_ROW_KIND,
    _O_EXPERTS,
    _O_USED,
    _O_EXPERT,
    _O_GATHER,
    _O_SEGMENT_START,
    _O_POSITION,
) = range(FIRST_WORD, FIRST_WORD + 7)
(
    _C_Y,
    _C_Y_STRIDE,
    _C_ROW_KIND,
    _C_USED,
    _C_WEIGHT,
    _C_POSITION,
    _C_OUT,
    _C_OUT_STRIDE,
    _C_WIDTH,
) = range(FIRST_WORD, FIRST_WORD + 9)
_ROWS_PER_CLAIM = 4
_TAKEN = -1.0  # gates are never negative
_SMALLEST_TOTAL = 2.0**-24  # keeps normalized weights finite when all gates are nearly 0


@kernel
def route(args: int, tid: int, nthreads: int) -> None:
    """Chooses each row's experts and their weights."""
    rows = row_count(args, arg_i64(args, _ROW_KIND))
    scratch = arg_i64(args, _SCRATCH) + tid * arg_i64(args, _EXPERTS) * 4
    used = arg_i64(args, _USED)
    first = claim(args, _ROWS_PER_CLAIM)
    while first < rows:
        for row in range(first, min(first + _ROWS_PER_CLAIM, rows)):
            logits = arg_i64(args, _LOGITS) + row * arg_i64(args, _LOGITS_STRIDE) * 4
            expert = arg_i64(args, _EXPERT) + row * used * 4
            weight = arg_i64(args, _WEIGHT) + row * used * 4
            _gate(args, logits, scratch)
            _take_largest(args, scratch, expert, weight)
            _finish_weights(args, weight)
        first = claim(args, _ROWS_PER_CLAIM)


@helper
def _gate(args: int, logits: int, gates: int) -> None:
    """The gating function over all experts, computed in float64."""
    experts = arg_i64(args, _EXPERTS)
    if arg_i64(args, _GATING) == SIGMOID:
        for e in range(experts):
            x = float(scalar_load_f32(logits, e * 4))
            scalar_store_f32(gates, e * 4, 1.0 / (1.0 + math.exp(-x)))
        return
    largest = scalar_load_f32(logits, 0)
    for e in range(1, experts):
        largest = max(largest, scalar_load_f32(logits, e * 4))
    total = 0.0
    for e in range(experts):
        total += math.exp(float(scalar_load_f32(logits, e * 4)) - largest)
    for e in range(experts):
        x = float(scalar_load_f32(logits, e * 4))
        scalar_store_f32(gates, e * 4, math.exp(x - largest) / total)


@helper
def _take_largest(args: int, gates: int, expert: int, weight: int) -> None:
    """The `used` largest gates, falling; ties go to the lower index. Overwrites `gates`."""
    for j in range(arg_i64(args, _USED)):
        best = _largest(gates, arg_i64(args, _EXPERTS))
        scalar_store_i32(expert, j * 4, best)
        scalar_store_f32(weight, j * 4, scalar_load_f32(gates, best * 4))
        scalar_store_f32(gates, best * 4, _TAKEN)


@helper
def _largest(gates: int, experts: int) -> int:
    """Index of the largest gate; NaN counts as larger than all, so that damage shows."""
    best, largest = -1, np.float32(_TAKEN)
    for e in range(experts):
        gate = scalar_load_f32(gates, e * 4)
        if gate != gate:
            return e
        if gate > largest:
            best, largest = e, gate
    return best


@helper
def _finish_weights(args: int, weight: int) -> None:
    used = arg_i64(args, _USED)
    factor = arg_f32(args, _SCALE)
    if arg_i64(args, _NORMALIZE) != 0:
        total = np.float32(0.0)
        for j in range(used):
            total += scalar_load_f32(weight, j * 4)
        factor /= max(total, np.float32(_SMALLEST_TOTAL))
    for j in range(used):
        scalar_store_f32(weight, j * 4, scalar_load_f32(weight, j * 4) * factor)


@kernel
def order_by_expert(args: int, tid: int, nthreads: int) -> None:
    """A counting sort of the (row, expert) pairs, done by one thread: they are few."""
    if claim(args, 1) > 0:
        return
    pairs = row_count(args, arg_i64(args, _O_ROW_KIND)) * arg_i64(args, _O_USED)
    experts, used = arg_i64(args, _O_EXPERTS), arg_i64(args, _O_USED)
    expert, start = arg_i64(args, _O_EXPERT), arg_i64(args, _O_SEGMENT_START)
    gather, position = arg_i64(args, _O_GATHER), arg_i64(args, _O_POSITION)
    for e in range(experts + 1):
        scalar_store_i64(start, e * 8, 0)
    for i in range(pairs):
        at = (scalar_load_i32(expert, i * 4) + 1) * 8
        scalar_store_i64(start, at, scalar_load_i64(start, at) + 1)
    for e in range(experts):
        total = scalar_load_i64(start, e * 8) + scalar_load_i64(start, e * 8 + 8)
        scalar_store_i64(start, e * 8 + 8, total)
    for i in range(pairs):
        at = scalar_load_i32(expert, i * 4) * 8
        row = scalar_load_i64(start, at)
        scalar_store_i64(start, at, row + 1)
        scalar_store_i32(gather, row * 4, i // used)
        scalar_store_i32(position, i * 4, row)
    # Each start has moved on to its segment's end, the next one's start.
    for e in range(experts, 0, -1):
        scalar_store_i64(start, e * 8, scalar_load_i64(start, e * 8 - 8))
    scalar_store_i64(start, 0, 0)


@kernel
def combine_experts(args: int, tid: int, nthreads: int) -> None:
    """Sums each row's weighted answers in the order of its experts."""
    rows = row_count(args, arg_i64(args, _C_ROW_KIND))
    first = claim(args, _ROWS_PER_CLAIM)
    while first < rows:
        for row in range(first, min(first + _ROWS_PER_CLAIM, rows)):
            _combine_row(args, row)
        first = claim(args, _ROWS_PER_CLAIM)


@helper
def _combine_row(args: int, row: int) -> None:
    used, width = arg_i64(args, _C_USED), arg_i64(args, _C_WIDTH)
    weight = arg_i64(args, _C_WEIGHT) + row * used * 4
    position = arg_i64(args, _C_POSITION) + row * used * 4
    out = arg_i64(args, _C_OUT) + row * arg_i64(args, _C_OUT_STRIDE) * 4
    y, y_bytes = arg_i64(args, _C_Y), arg_i64(args, _C_Y_STRIDE) * 4
    for i in range(0, width, 8):
        mask = lanes_below(width - i)
        total = splat_f32x8(0.0)
        for j in range(used):
            answer = y + scalar_load_i32(position, j * 4) * y_bytes
            total = fma(
                broadcast_f32x8(weight, j * 4), load_masked_f32x8(answer, i * 4, mask), total
            )
        store_masked_f32x8(out, i * 4, total, mask)
