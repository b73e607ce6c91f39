"""Mixture of experts: routing, pairs sorted by expert, grouped matmuls, the weighted sum.

A pair is (row, rank): pair p = row * used + rank. Nothing here waits for the device, and all
shapes follow from the number of rows, so that a step with experts can be captured in a graph.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.cuda.kernels.elementwise import act_mul, sigmoid
from localllm.backends.cuda.kernels.layout import PackedWeight
from localllm.backends.cuda.kernels.matmul import Grouping, Tiles, matmul, tiles_for
from localllm.backends.program import ActivationName


@triton.jit
def _first(values, value, n):
    """The lowest index of the value; some index below n where NaN hides it."""
    i = tl.arange(0, values.shape[0])
    return tl.minimum(tl.min(tl.where(values == value, i, n)), n - 1)


@triton.jit
def _route_kernel(
    logits, weights, experts, n_experts, logit_stride, factor,
    USED: tl.constexpr, BLOCK: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n_experts
    x = tl.load(logits + row * logit_stride + i, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        shares = tl.exp(x - tl.max(x))
        shares /= tl.sum(shares)
    else:
        shares = sigmoid(x)
    if NORMALIZE:
        left = tl.where(inside, shares, -1.0)
        total = 0.0
        for _ in range(USED):
            best = tl.max(left)
            total += best
            left = tl.where(i == _first(left, best, n_experts), -1.0, left)
        factor = factor / total
    left = tl.where(inside, shares, -1.0)
    for rank in range(USED):
        best = tl.max(left)
        expert = _first(left, best, n_experts)
        tl.store(weights + row * USED + rank, best * factor)
        tl.store(experts + row * USED + rank, expert)
        left = tl.where(i == expert, -1.0, left)


@triton.jit
def _combine_kernel(
    answers, weights, out, width, out_stride, USED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(USED):
        pair = row * USED + rank
        answer = tl.load(answers + pair * width + at, mask=inside, other=0.0)
        total += tl.load(weights + pair) * answer.to(tl.float32)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=inside)


def route(
    logits: Tensor,
    used: int,
    *,
    gating: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights float32 and experts int32 [rows, used], by falling weight (ties: lower index)."""
    rows, n_experts = logits.shape
    weights = torch.empty((rows, used), dtype=torch.float32, device=logits.device)
    experts = torch.empty((rows, used), dtype=torch.int32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, weights, experts, n_experts, logits.stride(0), scale,
            USED=used, BLOCK=triton.next_power_of_2(n_experts), SOFTMAX=gating == "softmax",
            NORMALIZE=normalize, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return weights, experts


def group_pairs(experts: Tensor, n_experts: int, divisor: int, tiles: Tiles) -> Grouping:
    """Sorts the pairs of `experts` [rows, used] by expert, each expert's in tiles of its own."""
    flat = experts.flatten().long()
    n_pairs, device = len(flat), experts.device
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(n_experts, dtype=torch.long, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tile_ends = torch.cumsum((counts + tiles.columns - 1) // tiles.columns, 0)
    n_tiles = min(n_pairs, n_experts) + n_pairs // tiles.columns  # never more than that
    tile_experts = torch.searchsorted(
        tile_ends, torch.arange(n_tiles, device=device), right=True
    ).int()
    tile_experts = torch.where(tile_experts < n_experts, tile_experts, -1)

    first_tile = torch.cat([tile_ends.new_zeros(1), tile_ends[:-1]])
    first_pair = torch.cumsum(counts, 0) - counts
    expert = flat[order]
    places = torch.arange(n_pairs, device=device) - first_pair[expert]
    pairs = torch.full((n_tiles * tiles.columns,), -1, dtype=torch.int32, device=device)
    pairs[first_tile[expert] * tiles.columns + places] = order.int()
    return Grouping(pairs, tile_experts, divisor)


def moe(
    x: Tensor,
    logits: Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    out: Tensor,
    *,
    used: int,
    act: ActivationName,
    gating: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float,
) -> None:
    """What `program.Moe` says; x float16, bfloat16 or float32, sums in float32."""
    rows = len(x)
    if rows == 0:
        return
    weights, experts = route(logits, used, gating=gating, normalize=normalize, scale=scale)
    pairs = rows * used
    tiles = tiles_for(-(-pairs // gate.experts), x.dtype)
    grouping = group_pairs(experts, gate.experts, used, tiles)

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((pairs, width), dtype=dtype, device=x.device)

    gates, ups = empty(gate.rows, torch.float32), empty(up.rows, torch.float32)
    matmul(x, gate, gates, grouping=grouping, tiles=tiles)
    matmul(x, up, ups, grouping=grouping, tiles=tiles)
    hidden = empty(gate.rows, x.dtype)
    act_mul(gates, ups, hidden, act)
    answers = empty(down.rows, torch.float32)
    by_pair = Grouping(grouping.pairs, grouping.tile_experts, 1)
    matmul(hidden, down, answers, grouping=by_pair, tiles=tiles)
    combine(answers, weights, out)


def combine(answers: Tensor, weights: Tensor, out: Tensor) -> None:
    """out[row] = the sum of weights[row, rank] * answers[pair], in the order of the ranks."""
    rows, width = out.shape
    _combine_kernel[(rows, -(-width // 1024))](
        answers, weights, out, width, out.stride(0),
        USED=weights.shape[1], BLOCK=1024, enable_fp_fusion=False,
    )  # fmt: skip
