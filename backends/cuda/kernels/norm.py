"""RMS and layer norm, with the sum that precedes it and the cast that follows."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x, residual, sum_out, weight, bias, out, x_stride, residual_stride, sum_stride, out_stride,
    weight_step, eps,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside, at = i < GROUP, run * GROUP + i
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        values += other.to(tl.float32)
        tl.store(sum_out + row * sum_stride + at, values.to(sum_out.dtype.element_ty), mask=inside)
    if LAYER:
        values -= tl.sum(values) / GROUP
        values = tl.where(inside, values, 0.0)
    values /= tl.sqrt(tl.sum(values * values) / GROUP + eps)
    if HAS_WEIGHT:
        values *= tl.load(weight + run * weight_step + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + run * weight_step + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    kind: Literal["rms", "layer"],
    group: int,
    residual: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> None:
    """out = norm(x + residual) over each run of `group` columns; sum_out = x + residual.

    Weight and bias have `group` or `width` entries, as `program.Norm` says; computed in float32,
    rounded to the types of out and sum_out. sum_out may be x or residual.
    """
    rows, width = out.shape
    if rows == 0:
        return
    if (residual is None) != (sum_out is None):
        raise ValueError("a residual needs a place for the sum, and the other way round")
    given = weight if weight is not None else bias
    per_column = given is not None and given.numel() == width
    _norm_kernel[(rows, width // group)](
        x, residual, sum_out, weight, bias, out,
        x.stride(0), residual.stride(0) if residual is not None else 0,
        sum_out.stride(0) if sum_out is not None else 0, out.stride(0),
        group if per_column else 0, eps,
        GROUP=group, BLOCK=triton.next_power_of_2(group), LAYER=kind == "layer",
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, enable_fp_fusion=False,
        num_warps=1 if group <= 256 else 4 if group <= 4096 else 8,
    )  # fmt: skip
