"""Elementary functions of float32 vectors of any length: the same bits on every machine."""

from __future__ import annotations

from typing import Any

import numba

from localllm.backends.cpu.simd.arithmetic import (
    fma,
    like,
    maximum,
    minimum,
    select,
    shift_left,
)
from localllm.backends.cpu.simd.convert import float_bits, int_bits


def inline(fn: Any) -> Any:
    """A helper for kernels, always inlined by LLVM; lives in the cache of those that call it."""
    return numba.njit(fn, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inline
def vexp(x: Any) -> Any:
    """e**x within 1e-7 relative; 0 below -87, e**88 above 88, NaN of NaN."""
    clamped = minimum(maximum(x, like(x, -87.0)), like(x, 88.0))
    # Adding 1.5 * 2**23 rounds to the nearest integer and leaves it in the low mantissa bits.
    shifted = clamped * like(x, 1.44269504) + like(x, 12582912.0)
    n = shifted - like(x, 12582912.0)
    # r = x - n ln 2, which lies in +-0.35; ln 2 in two parts
    r = fma(n, like(x, -0.6931471824645996), clamped)
    r = fma(n, like(x, 1.904654323148236e-09), r)
    # e**r = 1 + r + r**2 q(r), q fitted for least relative error of the whole (3e-9)
    q = fma(r, like(x, 0.0013814539415761828), like(x, 0.00836874544620514))
    q = fma(q, r, like(x, 0.04166838899254799))
    q = fma(q, r, like(x, 0.1666652113199234))
    q = fma(q, r, like(x, 0.4999999403953552))
    e_to_r = fma(q, r * r, r) + like(x, 1.0)
    two_to_n = float_bits(shift_left(int_bits(shifted), 23) + int_bits(like(x, 1.0)))
    result = select(x < like(x, -87.0), like(x, 0.0), e_to_r * two_to_n)
    return select(x == x, result, x)
