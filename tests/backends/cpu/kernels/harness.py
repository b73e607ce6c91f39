"""Runs single kernels on numpy arrays, with any number of threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.base import SamplingArrays
from localllm.backends.cpu import kernel as k
from localllm.backends.cpu.kernels.arguments import Arguments

_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def aligned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that start at a multiple of 64."""
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


class Header:
    """A step header; keeps the arrays that it points to alive."""

    def __init__(
        self,
        *,
        tokens: int = 0,
        logit_rows: int = 0,
        positions: npt.NDArray[np.int32] | None = None,
        query_start: npt.NDArray[np.int32] | None = None,
        seq_lens: npt.NDArray[np.int32] | None = None,
        slots: npt.NDArray[np.int32] | None = None,
        block_tables: npt.NDArray[np.int32] | None = None,
        sampling: SamplingArrays | None = None,
    ) -> None:
        self.words = np.zeros(k.HEADER_WORDS, np.int64)
        self._kept: list[Any] = [positions, query_start, seq_lens, slots, block_tables, sampling]
        self.words[k.H_TOKENS] = tokens
        self.words[k.H_LOGIT_ROWS] = logit_rows
        self.words[k.H_POSITIONS] = address(positions)
        self.words[k.H_QUERY_START] = address(query_start)
        self.words[k.H_SEQ_LENS] = address(seq_lens)
        self.words[k.H_SLOTS] = address(slots)
        self.words[k.H_BLOCK_TABLES] = address(block_tables)
        if seq_lens is not None:
            self.words[k.H_SEQS] = len(seq_lens)
        if block_tables is not None:
            self.words[k.H_TABLE_BLOCKS] = block_tables.shape[-1]
        if sampling is not None:
            for i, array in enumerate(vars(sampling).values()):
                self.words[k.H_SAMPLING + i] = address(array)


def run(kernel: k.Kernel, arguments: Arguments, header: Header, threads: int = 1) -> None:
    """Calls the kernel from `threads` threads at once."""
    counter = aligned(64)
    words = [address(header.words), address(counter), *arguments.words()]
    block = np.array(words, np.int64)
    native: Callable[[int, int, int], None] = _NATIVE(kernel.address)
    others = [
        threading.Thread(target=native, args=(address(block), tid, threads))
        for tid in range(1, threads)
    ]
    for thread in others:
        thread.start()
    native(address(block), 0, threads)
    for thread in others:
        thread.join()
