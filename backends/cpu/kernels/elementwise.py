"""Operations that treat every element alike: add, scale, soft-cap, activations.

Work is claimed in spans: runs of `SPAN` columns of one row, several at a time in large batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.backends.cpu.kernel import (
    Kernel,
    arg_f32,
    arg_i64,
    claim,
    helper,
    kernel,
    kernel_factory,
    row_count,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.kernels.functions import ACTIVATIONS, tanh
from localllm.backends.cpu.simd import (
    inline,
    lanes_below,
    load_f32x8,
    load_masked_f32x8,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
)

SPAN = 2048  # columns; shorter pieces cost more to claim than to compute
_CLAIMS = 8  # claims per thread when there are many spans


@dataclass(frozen=True)
class ElementwiseArgs(Arguments):
    """Words of every kernel here. Unary kernels ignore y; `scale` and `softcap` read `factor`."""

    out: int
    out_stride: int
    rows: int  # row kind
    width: int
    x: int
    x_stride: int
    y: int = 0
    y_stride: int = 0
    factor: float = 0.0
    per_row: int = 1  # rows of x for each row of the step (experts in use)


_OUT, _OUT_STRIDE, _ROWS, _WIDTH, _X, _X_STRIDE, _Y, _Y_STRIDE, _FACTOR, _PER_ROW = range(
    FIRST_WORD, FIRST_WORD + 10
)


@helper
def _spans(args: int) -> int:
    rows = row_count(args, arg_i64(args, _ROWS)) * arg_i64(args, _PER_ROW)
    return rows * ((arg_i64(args, _WIDTH) + SPAN - 1) // SPAN)


@helper
def _claim_size(spans: int, threads: int) -> int:
    return max(1, spans // (threads * _CLAIMS))


@inline
def _row_and_column(args: int, span: int) -> tuple[int, int]:
    per_row = (arg_i64(args, _WIDTH) + SPAN - 1) // SPAN
    row = span // per_row
    return row, (span - row * per_row) * SPAN


def _unary(function: Callable[[Any, Any], Any]) -> Kernel:
    """out = function(x, factor), both vectors."""

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        spans, factor = _spans(args), splat_f32x8(arg_f32(args, _FACTOR))
        size = _claim_size(spans, n)
        first = claim(args, size)
        while first < spans:
            for span in range(first, min(first + size, spans)):
                row, start = _row_and_column(args, span)
                x = arg_i64(args, _X) + row * arg_i64(args, _X_STRIDE) * 4
                out = arg_i64(args, _OUT) + row * arg_i64(args, _OUT_STRIDE) * 4
                end = min(start + SPAN, arg_i64(args, _WIDTH))
                whole = start + (end - start) // 8 * 8
                for at in range(start * 4, whole * 4, 32):
                    store_f32x8(out, at, function(load_f32x8(x, at), factor))
                if whole < end:
                    mask = lanes_below(end - whole)
                    rest = function(load_masked_f32x8(x, whole * 4, mask), factor)
                    store_masked_f32x8(out, whole * 4, rest, mask)
            first = claim(args, size)

    return run


def _binary(function: Callable[[Any, Any], Any]) -> Kernel:
    """out = function(x, y), all vectors."""

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        spans = _spans(args)
        size = _claim_size(spans, n)
        first = claim(args, size)
        while first < spans:
            for span in range(first, min(first + size, spans)):
                row, start = _row_and_column(args, span)
                x = arg_i64(args, _X) + row * arg_i64(args, _X_STRIDE) * 4
                y = arg_i64(args, _Y) + row * arg_i64(args, _Y_STRIDE) * 4
                out = arg_i64(args, _OUT) + row * arg_i64(args, _OUT_STRIDE) * 4
                end = min(start + SPAN, arg_i64(args, _WIDTH))
                whole = start + (end - start) // 8 * 8
                for at in range(start * 4, whole * 4, 32):
                    store_f32x8(out, at, function(load_f32x8(x, at), load_f32x8(y, at)))
                if whole < end:
                    mask = lanes_below(end - whole)
                    last_x = load_masked_f32x8(x, whole * 4, mask)
                    last_y = load_masked_f32x8(y, whole * 4, mask)
                    store_masked_f32x8(out, whole * 4, function(last_x, last_y), mask)
            first = claim(args, size)

    return run


@inline
def _times(x: Any, factor: Any) -> Any:
    return x * factor


@inline
def _softcapped(x: Any, cap: Any) -> Any:
    return cap * tanh(x / cap)


@inline
def _sum(x: Any, y: Any) -> Any:
    return x + y


@kernel_factory
def scale() -> Kernel:
    """out = x * factor."""
    return _unary(_times)


@kernel_factory
def softcap() -> Kernel:
    """out = factor * tanh(x / factor)."""
    return _unary(_softcapped)


@kernel_factory
def add() -> Kernel:
    """out = x + y."""
    return _binary(_sum)


@kernel_factory
def activation(name: str) -> Kernel:
    """out = act(x)."""
    act = ACTIVATIONS[name]

    @inline
    def apply(x: Any, factor: Any) -> Any:
        return act(x)

    return _unary(apply)


@kernel_factory
def act_mul(name: str) -> Kernel:
    """out = act(x) * y."""
    act = ACTIVATIONS[name]

    @inline
    def apply(x: Any, y: Any) -> Any:
        return act(x) * y

    return _binary(apply)
