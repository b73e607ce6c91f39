"""Quantized matrix-vector products on an Apple GPU: the launch. Not yet run on Apple hardware."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from localllm.backends.mps.shaders import FORMATS, LANES, ROWS_PER_GROUP, kernel_name, source
from localllm.gguf import TensorType
from localllm.gguf.blocks import row_bytes


@dataclass(frozen=True)
class MetalWeight:
    """A matrix [rows, cols] in the file's layout on the device."""

    type: TensorType
    rows: int
    cols: int
    raw: Tensor  # uint8 [rows, row bytes]
    shape: Tensor  # int32: rows, cols, row bytes, as the kernel reads them

    @classmethod
    def load(cls, tensor_type: TensorType, raw: Tensor, rows: int, cols: int) -> Self:
        """`raw` is on the device. Raises ValueError for a type without a kernel."""
        if tensor_type not in FORMATS:
            raise ValueError(f"no Metal kernel for {tensor_type.name}")
        shape = [rows, cols, row_bytes(tensor_type, cols)]
        on_device = torch.tensor(shape, dtype=torch.int32, device=raw.device)
        return cls(tensor_type, rows, cols, raw.contiguous(), on_device)


def matvec(x: Tensor, weight: MetalWeight, out: Tensor) -> None:
    """out [vectors, rows] = x [vectors, cols] @ weight.T; both float32 or both float16,
    contiguous."""
    if len(x) == 0:
        return
    kernel = getattr(_library(), kernel_name(weight.type, half=x.dtype == torch.float16))
    groups = -(-weight.rows // ROWS_PER_GROUP)
    group_size = (LANES * ROWS_PER_GROUP, 1, 1)
    kernel(
        weight.raw, x, out, weight.shape,
        threads=(groups * group_size[0], len(x), 1), group_size=group_size,
    )  # fmt: skip


@cache
def _library() -> Any:
    return torch.mps.compile_shader(source())
