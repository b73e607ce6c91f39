"""The paged caches of a program's attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cuda.kernels.paged import SCALE_GROUP, PagedCache
from localllm.backends.program import KVGroup
from localllm.errors import RequestError

Q8_0 = torch.int8


@dataclass(frozen=True)
class Caches:
    """`layers` by group. Each has one block more than the engine's `n_blocks`, which belongs to no
    sequence: rows that only fill a step up are stored there."""

    layers: list[list[PagedCache]]
    n_blocks: list[int]

    @classmethod
    def empty(
        cls,
        groups: Sequence[KVGroup],
        n_blocks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Caches:
        layers = [
            [
                PagedCache.empty(n + 1, kv.kv_heads, kv.key_dim, kv.value_dim, dtype, device)
                for kv in group.layers
            ]
            for group, n in zip(groups, n_blocks, strict=True)
        ]
        return cls(layers, list(n_blocks))


def block_bytes(group: KVGroup, dtype: torch.dtype) -> int:
    """Over all layers of the group. RequestError where heads cannot be kept in that type."""
    total = 0
    for layer in group.layers:
        elements = layer.kv_heads * (layer.key_dim + layer.value_dim)
        total += elements * dtype.itemsize
        if dtype == Q8_0:
            if layer.key_dim % SCALE_GROUP or layer.value_dim % SCALE_GROUP:
                raise RequestError(
                    f"heads of {layer.key_dim} and {layer.value_dim} dimensions cannot be kept in "
                    f"q8_0, which has a scale for {SCALE_GROUP}",
                    param="kv_cache_dtype",
                )
            total += elements // SCALE_GROUP * torch.float16.itemsize
    return BLOCK_TOKENS * total
