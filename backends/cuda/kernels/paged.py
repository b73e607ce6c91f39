"""The paged cache of one attention layer, as the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from localllm.backends.base import BLOCK_TOKENS

SCALE_GROUP = 32  # elements of q8_0 that share a scale


@dataclass(frozen=True)
class PagedCache:
    """Keys and values [blocks, BLOCK_TOKENS, KV heads, dimension], the last dimension contiguous.

    float16, bfloat16 or float32; or int8 (q8_0) with float16 scales
    [blocks, BLOCK_TOKENS, KV heads, dimension / 32], strided like the rest.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def empty(
        cls,
        n_blocks: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Zeros; dtype int8 means q8_0. A head's positions of a block lie side by side.

        Raises ValueError where q8_0's groups do not divide a head.
        """

        def pages(dim: int, dtype: torch.dtype) -> Tensor:
            shape = (n_blocks, kv_heads, BLOCK_TOKENS, dim)
            return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)

        keys, values = pages(key_dim, dtype), pages(value_dim, dtype)
        if dtype != torch.int8:
            return cls(keys, values)
        if key_dim % SCALE_GROUP or value_dim % SCALE_GROUP:
            raise ValueError(f"heads of {key_dim} and {value_dim} cannot be kept as q8_0")
        return cls(
            keys,
            values,
            pages(key_dim // SCALE_GROUP, torch.float16),
            pages(value_dim // SCALE_GROUP, torch.float16),
        )

    @property
    def quantized(self) -> bool:
        return self.key_scales is not None

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]


def page_strides(pages: Tensor | None) -> tuple[int, int, int]:
    """Elements from a block, a position, a head to the next; zeros for nothing."""
    if pages is None:
        return 0, 0, 0
    if pages.stride(3) != 1:
        raise ValueError("a head's dimensions must be contiguous")
    return pages.stride(0), pages.stride(1), pages.stride(2)
