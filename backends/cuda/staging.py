"""What a step reads from the host: written into pinned memory, sent in one copy.

Pieces that are taken in the same order and sizes lie at the same addresses, so that a recorded
graph finds the inputs of every later step of its shape.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_LINE = 64  # words; what kernels are compiled for depends on the alignment of their operands
_WORD = 4  # bytes
# Unsigned words keep their bits in signed ones.
_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint64): torch.int64,
}


class Piece(NamedTuple):
    """The same array on both sides."""

    host: Array
    device: Tensor


class Staging:
    """`words` of 4 bytes on both sides. `send` may still be at work when it returns."""

    def __init__(self, device: torch.device, words: int) -> None:
        self.words = words
        self._source = host_memory(device, words)
        self._host = self._source.numpy()
        self._device = torch.empty(words, dtype=torch.int32, device=device)
        self._sent = event(device)

    def wait(self) -> None:
        """Until the host's side may be written again."""
        if self._sent is not None:
            self._sent.synchronize()

    def take(self, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Piece, int]:
        """An array that starts at word `at`, and where the next one may start."""
        words = math.prod(shape) * dtype.itemsize // _WORD
        host = self._host[at : at + words].view(dtype).reshape(shape)
        device = self._device[at : at + words].view(_TYPES[dtype]).view(shape)
        return Piece(host, device), at + padded(words)

    def put(self, at: int, array: Array) -> tuple[Tensor, int]:
        """Like `take`, filled; an array that finds no room goes by itself."""
        if at + padded(array.nbytes // _WORD) > self.words:
            return torch.from_numpy(np.array(array)).to(self._device.device), at
        piece, end = self.take(at, array.shape, array.dtype)
        piece.host[...] = array
        return piece.device, end

    def send(self, words: int) -> None:
        """Everything before word `words`."""
        words = min(words, self.words)
        self._device[:words].copy_(self._source[:words], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def host_memory(device: torch.device, words: int) -> Tensor:
    """int32 that the device can copy from and to while the host does something else."""
    return torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")


def event(device: torch.device) -> torch.cuda.Event | None:
    """To record what is in the device's queue, where it has one."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def padded(words: int) -> int:
    return -(-words // _LINE) * _LINE
