"""Elementary functions of eight floats: the same bits on every machine."""

from __future__ import annotations

from typing import Any

import numba

from localllm.backends.cpu.simd.arithmetic import (
    fma,
    maximum,
    minimum,
    select,
    shift_left,
    splat_f32x8,
    splat_i32x8,
)
from localllm.backends.cpu.simd.convert import as_f32x8, i32_to_f32, round_to_i32


def inline(fn: Any) -> Any:
    """A helper for kernels, always inlined by LLVM; lives in the cache of those that call it."""
    return numba.njit(fn, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inline
def vexp(x: Any) -> Any:
    """e**x within 1e-7 relative; 0 below -87, e**88 above 88, NaN of NaN."""
    clamped = minimum(maximum(x, splat_f32x8(-87.0)), splat_f32x8(88.0))
    n = round_to_i32(clamped * splat_f32x8(1.44269504))
    # r = x - n ln 2, which lies in +-0.35; ln 2 in two parts
    r = fma(i32_to_f32(n), splat_f32x8(-0.6931471824645996), clamped)
    r = fma(i32_to_f32(n), splat_f32x8(1.904654323148236e-09), r)
    # e**r = 1 + r + r**2 q(r), q fitted for least relative error of the whole (3e-9)
    q = fma(r, splat_f32x8(0.0013814539415761828), splat_f32x8(0.00836874544620514))
    q = fma(q, r, splat_f32x8(0.04166838899254799))
    q = fma(q, r, splat_f32x8(0.1666652113199234))
    q = fma(q, r, splat_f32x8(0.4999999403953552))
    e_to_r = fma(q, r * r, r) + splat_f32x8(1.0)
    two_to_n = as_f32x8(shift_left(n + splat_i32x8(127), 23))
    result = select(x < splat_f32x8(-87.0), splat_f32x8(0.0), e_to_r * two_to_n)
    return select(x == x, result, x)
