"""The operations without state, each on whole matrices [rows, width].

A row's result has the same bits whatever other rows there are. Elementwise functions and sums along
a row give that for free; `linear` sees to it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from localllm.backends.base import Int32Array
from localllm.backends.program import ActivationName, FloatArray, RopeTable

TILE_ROWS = 16

_HALF = np.float32(0.5)


def linear(x: FloatArray, weight: FloatArray) -> FloatArray:
    """x @ weight.T.

    BLAS sums in another order for few rows than for many, so it only ever gets TILE_ROWS of them.
    """
    out = np.empty((len(x), len(weight)), np.float32)
    tile = np.zeros((TILE_ROWS, x.shape[1]), np.float32)
    for start in range(0, len(x), TILE_ROWS):
        part = x[start : start + TILE_ROWS]
        tile[: len(part)] = part
        out[start : start + TILE_ROWS] = (tile @ weight.T)[: len(part)]
    return out


def norm(
    x: FloatArray,
    weight: FloatArray | None,
    bias: FloatArray | None,
    *,
    eps: float,
    kind: Literal["rms", "layer"],
    group: int,
) -> FloatArray:
    runs = x.reshape(len(x), x.shape[1] // group, group)  # also of no rows at all
    if kind == "layer":
        runs = runs - runs.mean(axis=-1, keepdims=True)
    variance = np.square(runs).mean(axis=-1, keepdims=True)
    runs = runs / np.sqrt(variance + np.float32(eps))
    if weight is not None:
        runs = runs * weight.reshape(-1, group)
    if bias is not None:
        runs = runs + bias.reshape(-1, group)
    out: FloatArray = runs.reshape(x.shape)
    return out


def activate(x: FloatArray, act: ActivationName) -> FloatArray:
    out: FloatArray
    match act:
        case "silu":
            out = x * sigmoid(x)
        case "gelu":
            erf = np.vectorize(math.erf, otypes=[np.float32])
            out = _HALF * x * (1 + erf(x / np.float32(math.sqrt(2))))
        case "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            out = _HALF * x * (1 + np.tanh(inner))
        case "relu":
            out = np.maximum(x, 0)
        case "relu_squared":
            out = np.square(np.maximum(x, 0))
    return out


def sigmoid(x: FloatArray) -> FloatArray:
    out: FloatArray = np.reciprocal(1 + np.exp(-x))
    return out


def softmax(x: FloatArray) -> FloatArray:
    """Along the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    out: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return out


def softcap(x: FloatArray, cap: float) -> FloatArray:
    out: FloatArray = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out


def rope(x: FloatArray, positions: Int32Array, head_dim: int, table: RopeTable) -> FloatArray:
    angles = positions[:, None].astype(np.float64) * table.inv_freq  # [rows, pairs]
    cos = (np.cos(angles) * table.scale).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * table.scale).astype(np.float32)[:, None, :]
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
    pairs = len(table.inv_freq)
    if table.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out.reshape(x.shape)


def position_scale(
    x: FloatArray, positions: Int32Array, *, beta: float, floor_scale: float, offset: float
) -> FloatArray:
    steps = np.floor((positions + offset) / floor_scale)
    out: FloatArray = x * (1 + beta * np.log1p(steps)).astype(np.float32)[:, None]
    return out


def moe(
    x: FloatArray,
    logits: FloatArray,
    gate: FloatArray,
    up: FloatArray,
    down: FloatArray,
    *,
    used: int,
    act: ActivationName,
    gating: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float,
) -> FloatArray:
    shares = softmax(logits) if gating == "softmax" else sigmoid(logits)
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if normalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    weights = weights * np.float32(scale)
    answers = np.empty((len(x), used, x.shape[1]), np.float32)
    for expert in np.unique(chosen):
        rows, ranks = np.nonzero(chosen == expert)
        h = x[rows]
        h = activate(linear(h, gate[expert]), act) * linear(h, up[expert])
        answers[rows, ranks] = linear(h, down[expert])
    out = np.zeros_like(x)
    for rank in range(used):
        out += weights[:, rank, None] * answers[:, rank]
    return out
