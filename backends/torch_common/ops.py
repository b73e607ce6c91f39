"""The operations without state, on float32 matrices [rows, width]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from localllm.backends.program import ActivationName, Moe, RopeTable
from localllm.backends.torch_common.arithmetic import elementwise, ordered_sum, softmax
from localllm.backends.torch_common.target import Target
from localllm.backends.torch_common.weights import Matrix

Product: TypeAlias = Callable[[Tensor, Matrix], Tensor]
"""x @ weight.T of float32 rows, in float32; a row's bits do not depend on the others."""


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    kind: Literal["rms", "layer"],
    group: int,
) -> Tensor:
    runs = x.reshape(len(x), x.shape[1] // group, group)  # also of no rows at all
    if kind == "layer":
        runs = runs - (ordered_sum(runs) / group)[..., None]
    variance = ordered_sum(runs * runs) / group
    runs = runs / torch.sqrt(variance + eps)[..., None]
    if weight is not None:
        runs = runs * weight.view(-1, group)
    if bias is not None:
        runs = runs + bias.view(-1, group)
    return runs.reshape(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + elementwise(torch.exp, -x))


def activate(x: Tensor, act: ActivationName) -> Tensor:
    match act:
        case "silu":
            return x * sigmoid(x)
        case "gelu":
            return 0.5 * x * (1 + elementwise(torch.erf, x / math.sqrt(2)))
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
            return 0.5 * x * (1 + elementwise(torch.tanh, inner))
        case "relu":
            return x.clamp(min=0)
        case "relu_squared":
            positive = x.clamp(min=0)
            return positive * positive


def softcap(x: Tensor, cap: float) -> Tensor:
    return cap * elementwise(torch.tanh, x / cap)


def angles(target: Target, positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, pairs], times the table's scale, of positions on `precise`."""
    inv_freq = torch.from_numpy(table.inv_freq).to(target.precise, torch.float64)
    turns = positions[:, None].double() * inv_freq
    cos, sin = (elementwise(f, turns) * table.scale for f in (torch.cos, torch.sin))
    return cos.float().to(target.device), sin.float().to(target.device)


def rope(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, table: RopeTable) -> Tensor:
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
    cos, sin = cos[:, None], sin[:, None]
    pairs = len(table.inv_freq)
    if table.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    out = heads.clone()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out.view(x.shape)


def position_factors(
    target: Target, positions: Tensor, *, beta: float, floor_scale: float, offset: float
) -> Tensor:
    """[rows, 1] of `PositionScale`, for positions on `precise`."""
    steps = torch.floor((positions.double() + offset) / floor_scale)
    factors = 1 + beta * elementwise(torch.log1p, steps)
    return factors.float()[:, None].to(target.device)


def moe(
    product: Product, op: Moe, x: Tensor, logits: Tensor, gate: Matrix, up: Matrix, down: Matrix
) -> Tensor:
    shares = softmax(logits) if op.gating == "softmax" else sigmoid(logits)
    # On the CPU: which experts have work decides what is computed, and Metal's sort makes no
    # promise about ties.
    falling, order = torch.sort(shares.cpu(), dim=1, descending=True, stable=True)
    weights, slots = falling[:, : op.used], order[:, : op.used].flatten()
    if op.normalize:
        weights = weights / ordered_sum(weights)[:, None]
    weights = (weights * op.scale).to(x.device)
    answers = torch.empty(len(x) * op.used, x.shape[1], device=x.device)
    for expert in sorted(set(slots.tolist())):
        places = torch.nonzero(slots == expert).flatten().to(x.device)
        h = x.index_select(0, places // op.used)
        gates, ups = product(h, gate.expert(expert)), product(h, up.expert(expert))
        answers[places] = product(activate(gates, op.act) * ups, down.expert(expert))
    ranked = answers.view(len(x), op.used, -1)
    out = torch.zeros_like(x)
    for rank in range(op.used):
        out = out + weights[:, rank, None] * ranked[:, rank]
    return out
