"""Weights on the device: quantized ones in the file's own blocks, dequantized when used."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import ProgressFn
from localllm.backends.program import Program
from localllm.backends.torch_common.dequantize import DEQUANTIZERS
from localllm.backends.torch_common.target import Target
from localllm.errors import GGUFError
from localllm.gguf import Tensor as FileTensor
from localllm.gguf import TensorType
from localllm.gguf.blocks import type_size

SLAB_ELEMENTS = 1 << 22  # of a matrix that are dequantized at once

_FLOATS = {
    TensorType.F32: torch.float32,
    TensorType.F16: torch.float16,
    TensorType.BF16: torch.bfloat16,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matrix:
    """Rows of weights, or those of several experts one after another (`experts` > 0).

    `data` is uint8 [rows, bytes of a row] of the file's blocks where `kind` is a quantized format,
    else floats [rows, cols]. `rows` is that of one expert.
    """

    data: Tensor
    kind: TensorType | None
    rows: int
    cols: int
    experts: int
    dtype: torch.dtype  # to multiply in

    def expert(self, number: int) -> Matrix:
        part = self.data[number * self.rows : (number + 1) * self.rows]
        return replace(self, data=part, experts=0)

    def slabs(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, values [some rows, cols] in `dtype`) until all rows were there."""
        step = max(8, SLAB_ELEMENTS // self.cols // 8 * 8)
        for first in range(0, self.rows, step):
            yield first, self._values(self.data[first : first + step], self.dtype)

    def gather(self, rows: Tensor) -> Tensor:
        """The named rows in float32."""
        return self._values(self.data.index_select(0, rows), torch.float32)

    def _values(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        if self.kind is None:
            return data.to(dtype)
        blocks = data.reshape(-1, type_size(self.kind))
        return DEQUANTIZERS[self.kind](blocks).view(len(data), self.cols).to(dtype)


class Weights:
    """A program's weights by name: `matrices`, and `vectors` in float32."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Tensor] = {}

    @classmethod
    def load(
        cls,
        target: Target,
        program: Program,
        tensors: Mapping[str, FileTensor],
        progress: ProgressFn,
    ) -> Weights:
        """Copies them to the device; the file's pages are dropped on the way.

        `progress` hears which formats are dequantized for good, since they have no dequantizer.
        """
        names, vectors = program.weights(), program.vectors()
        for name in names:
            if name not in tensors:
                raise GGUFError(f"tensor {name!r} is missing")
        matrices = [tensors[name] for name in names if name not in vectors]
        report_kept(matrices, {*DEQUANTIZERS, *_FLOATS}, target.dtype, progress)
        weights, routers = cls(target), program.routers()
        for name in names:
            if name in vectors:
                weights.vectors[name] = weights._copied(tensors[name].dequantize()).flatten()
            else:
                weights._add(tensors[name], torch.float32 if name in routers else target.dtype)
            tensors[name].drop_pages()
        return weights

    def vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.vectors[name]

    def _add(self, tensor: FileTensor, dtype: torch.dtype) -> None:
        if len(tensor.shape) not in (2, 3):
            raise GGUFError(f"tensor {tensor.name!r} has shape {tensor.shape}, not a matrix's")
        rows, cols = tensor.shape[-2:]
        experts = tensor.shape[0] if len(tensor.shape) == 3 else 0
        kind = tensor.type if tensor.type in DEQUANTIZERS else None
        data = self._data(tensor, dtype)
        self.matrices[tensor.name] = Matrix(data, kind, rows, cols, experts, dtype)

    def _data(self, tensor: FileTensor, dtype: torch.dtype) -> Tensor:
        if tensor.type in DEQUANTIZERS:
            return self._copied(tensor.raw())
        kept = _FLOATS.get(tensor.type)
        if kept is None:
            return self._copied(tensor.dequantize()).to(dtype).view(-1, tensor.shape[-1])
        values = self._copied(tensor.raw()).view(kept)
        return values.to(dtype) if dtype.itemsize <= kept.itemsize else values

    def _copied(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """On the device, in memory that torch has aligned."""
        copy = torch.from_numpy(np.array(array))
        device = self._target.device
        return copy.clone() if device.type == "cpu" else copy.to(device)


def report_kept(
    tensors: Sequence[FileTensor],
    known: Collection[TensorType],
    dtype: torch.dtype,
    progress: ProgressFn,
) -> None:
    """Tells of the formats that are not `known`: their weights are kept in `dtype`."""
    found: dict[TensorType, list[str]] = {}
    for tensor in tensors:
        if tensor.type not in known:
            found.setdefault(tensor.type, []).append(tensor.name)
    for kind, names in found.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{others}: {kind.name} is kept as {str(dtype).removeprefix('torch.')}"
        _log.info(text)
        progress(text)
