"""Keys and values of the layers, kept as `Target` says: in its dtype, or as q8_0.

q8_0: of each 32 values of a head the largest magnitude over 127 in float16, and the values over
that, rounded to int8 with halves away from zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.program import KVLayer
from localllm.backends.torch_common.target import Target
from localllm.errors import RequestError

SCALE_GROUP = 32  # values that share a scale
_LARGEST = 127.0


@dataclass(frozen=True)
class Rows:
    """Keys or values of one layer, [slot, KV head, dimension].

    `scales` are float16 [slot, KV head, dimension / 32] where `data` is int8.
    """

    data: Tensor
    scales: Tensor | None = None

    @classmethod
    def empty(cls, target: Target, slots: int, heads: int, dim: int) -> Self:
        if not target.quantized_kv:
            return cls(_untouched(target, (slots, heads, dim), target.dtype))
        scales = (slots, heads, _scales_of(dim))
        return cls(
            _untouched(target, (slots, heads, dim), torch.int8),
            _untouched(target, scales, torch.float16),
        )

    def store(self, new: Tensor, slots: Tensor) -> None:
        """New rows [tokens, KV heads * dimension] in float32."""
        values = new.reshape(-1, *self.data.shape[1:])
        if self.scales is None:
            self.data[slots] = values.to(self.data.dtype)
        else:
            self.data[slots], self.scales[slots] = quantized(values)

    def gather(self, slots: Tensor) -> Tensor:
        """[slots, KV head, dimension] in float32."""
        rows = self.data.index_select(0, slots).float()
        if self.scales is None:
            return rows
        scales = self.scales.index_select(0, slots).float()[..., None]
        return (rows.view(*scales.shape[:-1], SCALE_GROUP) * scales).view(rows.shape)


@dataclass(frozen=True)
class LayerCache:
    keys: Rows
    values: Rows

    @classmethod
    def empty(cls, target: Target, layer: KVLayer, n_blocks: int) -> Self:
        """Raises RequestError where heads cannot be kept as the target says."""
        slots = n_blocks * BLOCK_TOKENS
        return cls(
            Rows.empty(target, slots, layer.kv_heads, layer.key_dim),
            Rows.empty(target, slots, layer.kv_heads, layer.value_dim),
        )

    @property
    def n_blocks(self) -> int:
        return len(self.keys.data) // BLOCK_TOKENS

    @property
    def kv_heads(self) -> int:
        return self.keys.data.shape[1]


def block_bytes(target: Target, layer: KVLayer) -> int:
    """Of one block of a layer. Raises as `LayerCache.empty` does."""
    per_head = sum(_head_bytes(target, dim) for dim in (layer.key_dim, layer.value_dim))
    return BLOCK_TOKENS * layer.kv_heads * per_head


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float16 of rows [..., dimension] in float32."""
    groups = values.reshape(*values.shape[:-1], -1, SCALE_GROUP)
    scales = (groups.abs().amax(-1) / _LARGEST).half()
    factors = scales.float()[..., None]
    scaled = groups / torch.where(factors == 0, 1.0, factors)
    away = torch.where(scaled < 0, torch.ceil(scaled - 0.5), torch.floor(scaled + 0.5))
    codes = away.clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return codes.view(values.shape), scales


def _head_bytes(target: Target, dim: int) -> int:
    if target.quantized_kv:
        return dim + _scales_of(dim) * torch.float16.itemsize
    return dim * target.dtype.itemsize


def _scales_of(dim: int) -> int:
    if dim % SCALE_GROUP:
        raise RequestError(
            f"this model's heads of {dim} cannot be kept as q8_0, which takes {SCALE_GROUP} values "
            "at a time",
            param="kv_cache_dtype",
        )
    return dim // SCALE_GROUP


def _untouched(target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any values, and on the CPU of pages that take no memory until they are written."""
    if target.device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=target.device)
    integers = np.zeros(shape, f"i{dtype.itemsize}")
    return torch.from_numpy(integers).view(dtype)
