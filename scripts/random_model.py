"""Shapes of known models, and random blocks in the formats of their files.

Needs numpy alone, so that a machine without the gguf package can make a model too. Scales are such
that activations stay near 1. The mix of formats is what llama.cpp gives a file of that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localllm.gguf import TensorType
from localllm.gguf.blocks import row_bytes, type_size

Bytes = npt.NDArray[np.uint8]
Fill = Callable[[Bytes, float], None]

ARCHITECTURE = "llama"
CONTEXT = 131072
ROPE_BASE = 500000.0
RMS_EPSILON = 1e-5
SMALLEST_VOCABULARY = 512


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SHAPES = {
    "tiny": Shape(layers=2, width=256, ffn=512, heads=4, kv_heads=2, vocab=SMALLEST_VOCABULARY),
    "llama-1b": Shape(layers=16, width=2048, ffn=8192, heads=32, kv_heads=8, vocab=32000),
    "llama-8b": Shape(layers=32, width=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256),
}


@dataclass(frozen=True)
class TensorPlan:
    """A matrix [rows, cols] of weights that spread by `std`; a vector of ones in float32."""

    name: str
    rows: int
    cols: int
    type: TensorType = TensorType.F32
    std: float = 1.0

    @property
    def n_bytes(self) -> int:
        return self.rows * row_bytes(self.type, self.cols)


def _fill_q8_0(blocks: Bytes, std: float) -> None:
    blocks[:, :2] = _float16_bytes(std / 74)  # an even spread of -128..127


def _fill_q4_0(blocks: Bytes, std: float) -> None:
    blocks[:, :2] = _float16_bytes(std / 4.64)  # quants -8..7
    blocks[::2, 1] ^= 0x80  # their mean is not 0: every other scale is negative


def _fill_q4_k(blocks: Bytes, std: float) -> None:
    """w = d * scale * q - dmin * minimum with 6-bit scales and minima and q of 0..15."""
    d = std / 257
    blocks[:, :2] = _float16_bytes(d)
    blocks[:, 2:4] = _float16_bytes(7.5 * d)


def _fill_q5_k(blocks: Bytes, std: float) -> None:
    """As Q4_K, with q of 0..31."""
    d = std / 527
    blocks[:, :2] = _float16_bytes(d)
    blocks[:, 2:4] = _float16_bytes(15.5 * d)


def _fill_q2_k(blocks: Bytes, std: float) -> None:
    """w = d * scale * q - dmin * minimum with 4-bit scales and minima and q of 0..3."""
    d = std / 13.9
    blocks[:, 80:82] = _float16_bytes(d)
    blocks[:, 82:] = _float16_bytes(1.5 * d)


def _fill_q3_k(blocks: Bytes, std: float) -> None:
    """w = d * (scale - 32) * q with 6-bit scales and q of -4..3."""
    blocks[:, 108:] = _float16_bytes(std / 43.3)


def _fill_iq4_nl(blocks: Bytes, std: float) -> None:
    blocks[:, :2] = _float16_bytes(std / 67.4)  # a table of -127..113, whose mean is not 0
    blocks[::2, 1] ^= 0x80


def _fill_iq4_xs(blocks: Bytes, std: float) -> None:
    """w = d * (scale - 32) * entry of the same table, with 6-bit scales."""
    blocks[:, :2] = _float16_bytes(std / 1246)


def _fill_q6_k(blocks: Bytes, std: float) -> None:
    """w = d * scale * (q - 32); scales are kept small, so that d is no denormal number."""
    scales = blocks[:, 192:208].view(np.int8)
    scales >>= 4
    blocks[:, 208:] = _float16_bytes(std / 86)


def _float16_bytes(value: float) -> Bytes:
    return np.array([value], "<f2").view(np.uint8)


# Each sets the scales of random blocks so that weights spread by a standard deviation.
_FILLS: dict[TensorType, Fill] = {
    TensorType.Q8_0: _fill_q8_0,
    TensorType.Q4_0: _fill_q4_0,
    TensorType.Q4_K: _fill_q4_k,
    TensorType.Q6_K: _fill_q6_k,
    TensorType.Q2_K: _fill_q2_k,
    TensorType.Q3_K: _fill_q3_k,
    TensorType.Q5_K: _fill_q5_k,
    TensorType.IQ4_NL: _fill_iq4_nl,
    TensorType.IQ4_XS: _fill_iq4_xs,
}
BASE = {
    "Q2_K": TensorType.Q2_K,
    "Q3_K_S": TensorType.Q3_K,
    "Q4_K_M": TensorType.Q4_K,
    "Q8_0": TensorType.Q8_0,
    "Q4_0": TensorType.Q4_0,
    "IQ4_NL": TensorType.IQ4_NL,
    "IQ4_XS": TensorType.IQ4_XS,
}


def tensors(shape: Shape, mix: str, vocab: int) -> Iterator[TensorPlan]:
    """What a file of the model holds, in order."""
    base = BASE[mix]
    width, kv_width = shape.width, shape.kv_heads * shape.head_dim

    def matrix(name: str, rows: int, cols: int, form: TensorType = base) -> TensorPlan:
        return TensorPlan(f"{name}.weight", rows, cols, form, 1 / math.sqrt(cols))

    yield TensorPlan("token_embd.weight", vocab, width, base)
    for i in range(shape.layers):
        block = f"blk.{i}"
        finer = _exceptions(mix, shape, i)
        yield TensorPlan(f"{block}.attn_norm.weight", 1, width)
        yield matrix(f"{block}.attn_q", width, width)
        yield matrix(f"{block}.attn_k", kv_width, width)
        yield matrix(f"{block}.attn_v", kv_width, width, finer.get("attn_v", base))
        yield matrix(f"{block}.attn_output", width, width, finer.get("attn_output", base))
        yield TensorPlan(f"{block}.ffn_norm.weight", 1, width)
        yield matrix(f"{block}.ffn_gate", shape.ffn, width)
        yield matrix(f"{block}.ffn_up", shape.ffn, width)
        yield matrix(f"{block}.ffn_down", width, shape.ffn, finer.get("ffn_down", base))
    yield TensorPlan("output_norm.weight", 1, width)
    yield matrix("output", vocab, width, TensorType.Q8_0 if mix == "Q8_0" else TensorType.Q6_K)


def _exceptions(mix: str, shape: Shape, layer: int) -> dict[str, TensorType]:
    """The matrices of a layer that get more bits than the others."""
    few_kv_heads = shape.heads >= 4 * shape.kv_heads
    if mix == "Q4_K_M" and _is_finer(layer, shape.layers):
        return {"attn_v": TensorType.Q6_K, "ffn_down": TensorType.Q6_K}
    if mix == "Q2_K":
        attn_v = TensorType.Q4_K if few_kv_heads else TensorType.Q3_K
        return {"attn_v": attn_v, "attn_output": TensorType.Q3_K, "ffn_down": TensorType.Q3_K}
    if mix in ("IQ4_NL", "IQ4_XS"):
        found = {"attn_v": TensorType.Q5_K} if few_kv_heads else {}
        return found | ({"ffn_down": TensorType.Q5_K} if layer < shape.layers // 8 else {})
    return {}


def _is_finer(layer: int, layers: int) -> bool:
    """Whether Q4_K_M gives a layer's attn_v and ffn_down more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def hyperparameters(shape: Shape, vocab: int) -> dict[str, int | float]:
    """The file's keys that say how the model computes."""
    values = {
        "context_length": CONTEXT,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": ROPE_BASE,
        "attention.layer_norm_rms_epsilon": RMS_EPSILON,
        "vocab_size": vocab,
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


def contents(plan: TensorPlan, random: np.random.Generator) -> Bytes:
    """The tensor's bytes as a file has them: [blocks, bytes of a block]."""
    if plan.type == TensorType.F32:
        return np.ones((plan.rows * plan.cols, 1), "<f4").view(np.uint8)
    words = random.integers(0, 1 << 64, -(-plan.n_bytes // 8), np.uint64)
    blocks = words.view(np.uint8)[: plan.n_bytes].reshape(-1, type_size(plan.type))
    _FILLS[plan.type](blocks, plan.std)
    return blocks
