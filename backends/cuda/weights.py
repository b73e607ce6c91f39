"""Weights on the GPU: packed as the kernels read them, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import ProgressFn
from localllm.backends.cuda.kernels.layout import (
    PLAIN,
    QUANTIZED,
    TILE_ROWS,
    PackedWeight,
    pack,
)
from localllm.backends.program import Embed, Linear, Moe, Program
from localllm.backends.torch_common.weights import report_kept
from localllm.errors import GGUFError
from localllm.gguf import Tensor as FileTensor
from localllm.gguf import TensorType

SLAB_BYTES = 32 << 20  # of a file that are repacked at once: what that takes is a few times as much

_TYPES = {dtype: kind for kind, dtype in PLAIN.items()}


class Weights:
    """A program's weights: matrices and vectors by name, `products` by a Linear op's weights.

    Neighbours of one format in a Linear op are one matrix, so that the input is read once. A tied
    output is the embedding's matrix.
    """

    def __init__(self) -> None:
        self.matrices: dict[str, PackedWeight] = {}
        self.products: dict[tuple[str, ...], list[PackedWeight]] = {}
        self.vectors: dict[str, Tensor] = {}

    @classmethod
    def load(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        program: Program,
        tensors: Mapping[str, FileTensor],
        progress: ProgressFn,
    ) -> Weights:
        """`dtype` is that of the products. Pages of the file are dropped on the way.

        `progress` hears which formats have no kernel and are kept in `dtype`.
        """
        names, vectors = program.weights(), program.vectors()
        for name in names:
            if name not in tensors:
                raise GGUFError(f"tensor {name!r} is missing")
        loader = _Loader(device, dtype, program.routers(), tensors)
        matrices = [tensors[name] for name in names if name not in vectors]
        report_kept(matrices, {*QUANTIZED, *PLAIN}, dtype, progress)
        weights = cls()
        distinct = {_matrices(op) for op in program.ops}
        uses = Counter(name for names in distinct for name in names)
        for op in program.ops:
            if isinstance(op, Linear) and op.weights not in weights.products:
                weights.products[op.weights] = weights._product(loader, op.weights, uses)
            for name in () if isinstance(op, Linear) else _matrices(op):
                weights._matrix(loader, name)
        for name in names:
            if name in vectors:
                weights.vectors[name] = loader.vector(name)
        return weights

    def vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.vectors[name]

    def _product(
        self, loader: _Loader, names: Sequence[str], uses: Counter[str]
    ) -> list[PackedWeight]:
        runs: list[list[str]] = []
        for name in names:
            if runs and uses[name] == uses[runs[-1][-1]] == 1 and loader.joins(runs[-1][-1], name):
                runs[-1].append(name)
            else:
                runs.append([name])
        return [
            self._matrix(loader, run[0]) if len(run) == 1 else loader.matrix(run) for run in runs
        ]

    def _matrix(self, loader: _Loader, name: str) -> PackedWeight:
        if name not in self.matrices:
            self.matrices[name] = loader.matrix([name])
        return self.matrices[name]


class _Loader:
    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        precise: set[str],
        tensors: Mapping[str, FileTensor],
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._precise = precise
        self._tensors = tensors

    def joins(self, above: str, below: str) -> bool:
        """Whether the rows of one may follow those of the other in one matrix."""
        kind = self._kind(above)
        whole_tiles = kind in PLAIN or self._tensors[above].shape[0] % TILE_ROWS == 0
        return whole_tiles and kind == self._kind(below)

    def matrix(self, names: Sequence[str]) -> PackedWeight:
        """The rows of one or more tensors of the same columns."""
        tensors = [self._tensors[name] for name in names]
        for tensor in tensors:
            if len(tensor.shape) not in (2, 3):
                raise GGUFError(f"tensor {tensor.name!r} has shape {tensor.shape}, not a matrix's")
        first, kind = tensors[0], self._kind(names[0])
        experts = first.shape[0] if len(first.shape) == 3 else 1
        rows, cols = sum(tensor.shape[-2] for tensor in tensors), first.shape[-1]
        joined = _Joined(kind, experts, rows)
        for tensor in tensors:
            for raw in self._slabs(tensor, kind):
                joined.add(pack(kind, raw, len(raw), cols), len(raw))
            tensor.drop_pages()
        return PackedWeight(kind, rows, cols, experts, *joined.planes)

    def vector(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.type in PLAIN:
            values = _tensor(tensor.raw()).view(PLAIN[tensor.type]).float()
        else:
            values = torch.from_numpy(np.array(tensor.dequantize()))
        tensor.drop_pages()
        return values.flatten().to(self._device)

    def _kind(self, name: str) -> TensorType:
        """The format that a tensor is kept in."""
        kind = self._tensors[name].type
        if kind in QUANTIZED or (kind in PLAIN and kind != TensorType.F32):
            return kind
        return TensorType.F32 if name in self._precise else _TYPES[self._dtype]

    def _slabs(self, tensor: FileTensor, kind: TensorType) -> Iterator[Tensor]:
        """The tensor's rows by and by, as the format's bytes [rows, row bytes] on the device.

        A slab ends with a tile, or with an expert whose last tile is not full.
        """
        rows = tensor.shape[-2]
        if kind in PLAIN or rows % TILE_ROWS == 0:
            rows = tensor.rows  # experts lie as one tall matrix does
        source, values = tensor.raw(), None
        if tensor.type not in QUANTIZED and tensor.type not in PLAIN:
            values = tensor.dequantize().reshape(tensor.rows, -1)
        step = max(1, SLAB_BYTES // source.shape[1] // TILE_ROWS) * TILE_ROWS
        for start in range(0, tensor.rows, rows):
            for first in range(start, start + rows, step):
                last = min(first + step, start + rows)
                if values is not None:
                    slab = torch.from_numpy(np.array(values[first:last])).to(self._device)
                    yield slab.to(PLAIN[kind]).view(torch.uint8)
                    continue
                slab = _tensor(source[first:last]).to(self._device)
                if kind != tensor.type:
                    slab = slab.view(PLAIN[tensor.type]).to(PLAIN[kind]).view(torch.uint8)
                yield slab


class _Joined:
    """Planes of a matrix, written slab after slab: they lie in the order of the rows."""

    def __init__(self, kind: TensorType, experts: int, rows: int) -> None:
        self._tile = 1 if kind in PLAIN else TILE_ROWS
        self._rows = experts * self._padded(rows)
        self._done = 0
        self.planes: list[Tensor] = []

    def add(self, part: PackedWeight, rows: int) -> None:
        padded = self._padded(rows)
        pieces = [part.codes, part.high, part.scales, part.supers]
        if not self.planes:
            self.planes = [p.new_empty(p.numel() // padded * self._rows) for p in pieces]
        for plane, piece in zip(self.planes, pieces, strict=True):
            entries = piece.numel() // padded
            at = self._done * entries
            plane[at : at + piece.numel()] = piece.flatten()
        self._done += padded

    def _padded(self, rows: int) -> int:
        return -(-rows // self._tile) * self._tile


def _matrices(op: object) -> tuple[str, ...]:
    match op:
        case Linear(weights=weights):
            return weights
        case Embed(weight=weight):
            return (weight,)
        case Moe(gate=gate, up=up, down=down):
            return (gate, up, down)
        case _:
            return ()


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    """A copy: the file is mapped, and torch takes no memory that is read-only."""
    return torch.from_numpy(np.array(array))
