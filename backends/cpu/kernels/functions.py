"""Vector versions of the activation functions; coefficients fitted for least relative error."""

from __future__ import annotations

from typing import Any

from localllm.backends.cpu.simd import (
    absolute,
    fma,
    inline,
    maximum,
    minimum,
    select,
    splat_f32x8,
    vexp,
)

_SQRT_HALF = 0.7071067811865476
_GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
_GELU_CUBIC = 0.044715


@inline
def tanh(x: Any) -> Any:
    """tanh within 3e-7 relative."""
    z = x * x
    p = fma(z, splat_f32x8(-0.005717036547233532), splat_f32x8(0.020650578990003318))
    p = fma(p, z, splat_f32x8(-0.05374349525673199))
    p = fma(p, z, splat_f32x8(0.1333149124845133))
    p = fma(p, z, splat_f32x8(-0.3333328392358797))
    near = fma(x * z, p, x)
    size = absolute(x)
    e = vexp(size * splat_f32x8(-2.0))
    far = (splat_f32x8(1.0) - e) / (splat_f32x8(1.0) + e)
    far = select(x < splat_f32x8(0.0), splat_f32x8(0.0) - far, far)
    return select(size < splat_f32x8(0.625), near, far)


@inline
def erf(x: Any) -> Any:
    """The error function within 3e-7 relative."""
    z = x * x
    p = fma(z, splat_f32x8(7.853857657428125e-05), splat_f32x8(-0.0008010192505352303))
    p = fma(p, z, splat_f32x8(0.005188327558161923))
    p = fma(p, z, splat_f32x8(-0.026853811868054946))
    p = fma(p, z, splat_f32x8(0.11283585147002183))
    p = fma(p, z, splat_f32x8(-0.37612625824089935))
    p = fma(p, z, splat_f32x8(1.1283791657266886))
    near = x * p
    # 1 - e**(-x*x) q(t), t = 1 / (1 + x/2), q fitted on 1..4 where erf reaches 1
    size = minimum(absolute(x), splat_f32x8(4.0))
    t = splat_f32x8(1.0) / fma(size, splat_f32x8(0.5), splat_f32x8(1.0))
    q = fma(t, splat_f32x8(-0.05907798647221121), splat_f32x8(-0.040836258515281))
    q = fma(q, t, splat_f32x8(0.38357671131676296))
    q = fma(q, t, splat_f32x8(0.11438257706938766))
    q = fma(q, t, splat_f32x8(0.3261224810316859))
    q = fma(q, t, splat_f32x8(0.2745126360966316))
    q = fma(q, t, splat_f32x8(0.0005366015533938482))
    far = splat_f32x8(1.0) - vexp(splat_f32x8(0.0) - size * size) * q
    far = select(x < splat_f32x8(0.0), splat_f32x8(0.0) - far, far)
    return select(absolute(x) < splat_f32x8(1.0), near, far)


@inline
def silu(x: Any) -> Any:
    return x / (splat_f32x8(1.0) + vexp(splat_f32x8(0.0) - x))


@inline
def gelu(x: Any) -> Any:
    return splat_f32x8(0.5) * x * (splat_f32x8(1.0) + erf(x * splat_f32x8(_SQRT_HALF)))


@inline
def gelu_tanh(x: Any) -> Any:
    inner = x * splat_f32x8(_GELU_SCALE) * fma(x * x, splat_f32x8(_GELU_CUBIC), splat_f32x8(1.0))
    return splat_f32x8(0.5) * x * (splat_f32x8(1.0) + tanh(inner))


@inline
def relu(x: Any) -> Any:
    return maximum(x, splat_f32x8(0.0))


@inline
def relu_squared(x: Any) -> Any:
    y = maximum(x, splat_f32x8(0.0))
    return y * y


ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu_squared": relu_squared,
}
