"""RMS and layer norm over runs of columns, one run at a time in one fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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
from localllm.backends.cpu.simd import (
    fma,
    inline,
    lanes_below,
    load_f32x8,
    load_masked_f32x8,
    select,
    splat_f32x8,
    store_f32x8,
    store_masked_f32x8,
    sum_f32,
)

_ELEMENTS_PER_CLAIM = 2048


@dataclass(frozen=True)
class NormArgs(Arguments):
    """Words of the norm kernels.

    `weight` and `bias` are addresses of float32 vectors. Run g of a row takes their entries from
    g * `weight_step` and g * `bias_step` on: a step of 0 shares one group's entries.
    """

    out: int
    out_stride: int
    rows: int  # row kind
    width: int
    x: int
    x_stride: int
    group: int  # columns of a run
    weight: int
    weight_step: int
    bias: int
    bias_step: int
    eps: float


(
    _OUT,
    _OUT_STRIDE,
    _ROWS,
    _WIDTH,
    _X,
    _X_STRIDE,
    _GROUP,
    _WEIGHT,
    _WEIGHT_STEP,
    _BIAS,
    _BIAS_STEP,
    _EPS,
) = range(FIRST_WORD, FIRST_WORD + 12)


@helper
def _sum(x: int, n: int) -> float:
    """Sum of x[0..n] in two interleaved chains of eight lanes."""
    a, b = splat_f32x8(0.0), splat_f32x8(0.0)
    whole = n // 16 * 16
    for column in range(0, whole, 16):
        a += load_f32x8(x, column * 4)
        b += load_f32x8(x, column * 4 + 32)
    for column in range(whole, n, 8):
        a += load_masked_f32x8(x, column * 4, lanes_below(n - column))
    return sum_f32(a + b)


@helper
def _sum_of_squares(x: int, n: int, mean: np.float32) -> float:
    """Sum of (x - mean)**2 in four interleaved chains of eight lanes."""
    zero, center = splat_f32x8(0.0), splat_f32x8(mean)
    a, b, c, d = zero, zero, zero, zero
    whole = n // 32 * 32
    for column in range(0, whole, 32):
        v = load_f32x8(x, column * 4) - center
        a = fma(v, v, a)
        v = load_f32x8(x, column * 4 + 32) - center
        b = fma(v, v, b)
        v = load_f32x8(x, column * 4 + 64) - center
        c = fma(v, v, c)
        v = load_f32x8(x, column * 4 + 96) - center
        d = fma(v, v, d)
    for column in range(whole, n, 8):
        mask = lanes_below(n - column)
        v = select(mask, load_masked_f32x8(x, column * 4, mask) - center, zero)
        a = fma(v, v, a)
    return sum_f32((a + b) + (c + d))


def run_normalizer(kind: str, has_weight: bool, has_bias: bool) -> Any:
    """The helper one_run(out, x, n, weight, bias, eps), which normalizes n columns."""
    centered = kind == "layer"

    @inline
    def affine(v: Any, weight: Any, bias: Any) -> Any:
        if has_weight:
            v = v * weight
        if has_bias:
            v = v + bias
        return v

    @helper
    def one_run(out: int, x: int, n: int, weight: int, bias: int, eps: float) -> None:
        mean = np.float32(0.0)
        if centered:
            mean = _sum(x, n) / np.float32(n)
        variance = _sum_of_squares(x, n, mean) / np.float32(n)
        factor = splat_f32x8(np.float32(1.0) / np.sqrt(variance + eps))
        center = splat_f32x8(mean)
        w = b = splat_f32x8(0.0)
        whole = n // 8 * 8
        for at in range(0, whole * 4, 32):
            if has_weight:
                w = load_f32x8(weight, at)
            if has_bias:
                b = load_f32x8(bias, at)
            store_f32x8(out, at, affine((load_f32x8(x, at) - center) * factor, w, b))
        if whole < n:
            mask, at = lanes_below(n - whole), whole * 4
            if has_weight:
                w = load_masked_f32x8(weight, at, mask)
            if has_bias:
                b = load_masked_f32x8(bias, at, mask)
            v = (load_masked_f32x8(x, at, mask) - center) * factor
            store_masked_f32x8(out, at, affine(v, w, b), mask)

    return one_run


@kernel_factory
def norm(kind: str, has_weight: bool, has_bias: bool) -> Kernel:
    """out = (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias; `rms` has no mean."""
    one_run = run_normalizer(kind, has_weight, has_bias)

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        group = arg_i64(args, _GROUP)
        per_row = arg_i64(args, _WIDTH) // group
        runs = row_count(args, arg_i64(args, _ROWS)) * per_row
        size = (_ELEMENTS_PER_CLAIM + group - 1) // group
        first = claim(args, size)
        while first < runs:
            for item in range(first, min(first + size, runs)):
                row = item // per_row
                part = item - row * per_row
                one_run(
                    arg_i64(args, _OUT) + (row * arg_i64(args, _OUT_STRIDE) + part * group) * 4,
                    arg_i64(args, _X) + (row * arg_i64(args, _X_STRIDE) + part * group) * 4,
                    group,
                    arg_i64(args, _WEIGHT) + part * arg_i64(args, _WEIGHT_STEP) * 4,
                    arg_i64(args, _BIAS) + part * arg_i64(args, _BIAS_STEP) * 4,
                    arg_f32(args, _EPS),
                )
            first = claim(args, size)

    return run
