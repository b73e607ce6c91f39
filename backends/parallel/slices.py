"""Parts of a file's tensors, for backends to load as if they were tensors of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localllm.backends.parallel.layout import Interval, Intervals, length
from localllm.gguf import Tensor
from localllm.gguf.blocks import block_size, row_bytes, type_size


@dataclass(frozen=True)
class Slice:
    """What a rank has of tensor `name`: along `axis` the `parts` one after another.

    The axis counts from the last, -1. No parts: all of the tensor.
    """

    name: str
    axis: int = -1
    parts: Intervals = ()

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        if not self.parts:
            return whole
        shape = list(whole)
        shape[self.axis] = length(self.parts)
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class SlicedTensor(Tensor):
    """A tensor of which only `cut` exists. `raw` copies no more than that."""

    source: Tensor
    cut: Slice

    def raw(self) -> npt.NDArray[np.uint8]:
        width = row_bytes(self.source.type, self.source.shape[-1])
        whole = self.source.raw().reshape(*self.source.shape[:-1], width)
        kept = [_taken(whole, self.cut.axis, part) for part in self._parts()]
        found = kept[0] if len(kept) == 1 else np.concatenate(kept, axis=self.cut.axis)
        return np.ascontiguousarray(found.reshape(self.rows, -1))

    def drop_pages(self) -> None:
        self.source.drop_pages()

    def _parts(self) -> Intervals:
        """In bytes where columns are cut."""
        if self.cut.axis != -1:
            return self.cut.parts
        block, size = block_size(self.type), type_size(self.type)
        return tuple((start // block * size, end // block * size) for start, end in self.cut.parts)


def sliced(tensors: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> dict[str, Tensor]:
    """By the names that a rank's program uses. A tensor that the file lacks is left out."""
    return {
        name: _sliced(name, tensors[cut.name], cut)
        for name, cut in slices.items()
        if cut.name in tensors
    }


def _sliced(name: str, source: Tensor, cut: Slice) -> Tensor:
    shape = cut.shape(source.shape)
    block = block_size(source.type)
    if cut.axis == -1 and any(border % block for part in cut.parts for border in part):
        raise ValueError(f"{cut} is not on borders of {source.type.name}'s blocks of {block}")
    n_bytes = math.prod(shape[:-1]) * row_bytes(source.type, shape[-1])
    data, offset = source._data, source._offset
    if not cut.parts:
        return Tensor(name, source.type, shape, n_bytes, data, offset)
    return SlicedTensor(name, source.type, shape, n_bytes, data, offset, source, cut)


def _taken(array: npt.NDArray[np.uint8], axis: int, interval: Interval) -> npt.NDArray[np.uint8]:
    at = [slice(None)] * array.ndim
    at[axis] = slice(*interval)
    return array[tuple(at)]
