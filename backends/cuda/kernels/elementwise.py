"""Activations, alone or times `up`, and sums. Operands are windows [rows, width] of any stride."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.program import ActivationName

_BLOCK = 1024


@triton.jit
def sigmoid(x):
    """Without an overflow on either side."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "silu":
        y = x * sigmoid(x)
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACT == "relu_squared")
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def _activation_kernel(
    x, up, out, width, x_stride, up_stride, out_stride,
    ACT: tl.constexpr, HAS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = activate(tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32), ACT)
    if HAS_UP:
        values *= tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(a, b, out, width, a_stride, b_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    left = tl.load(a + row * a_stride + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + row * b_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, (left + right).to(out.dtype.element_ty), mask=inside)


def _grid(out: Tensor) -> tuple[int, int]:
    return len(out), -(-out.shape[1] // _BLOCK)


def activation(x: Tensor, out: Tensor, act: ActivationName) -> None:
    """out = act(x)."""
    _activate(x, None, out, act)


def act_mul(gate: Tensor, up: Tensor, out: Tensor, act: ActivationName) -> None:
    """out = act(gate) * up."""
    _activate(gate, up, out, act)


def _activate(x: Tensor, up: Tensor | None, out: Tensor, act: ActivationName) -> None:
    if len(out):
        _activation_kernel[_grid(out)](
            x, up, out, out.shape[1], x.stride(0), up.stride(0) if up is not None else 0,
            out.stride(0), ACT=act, HAS_UP=up is not None, BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip


def add(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a + b in float32, rounded to out's type."""
    if len(out):
        _add_kernel[_grid(out)](
            a, b, out, out.shape[1], a.stride(0), b.stride(0), out.stride(0),
            BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
