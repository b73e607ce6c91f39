"""Memory for the kernels: aligned blocks, and how much the machine has to give."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from localllm.backends.cpu.kernel import CACHE_LINE

ByteArray = npt.NDArray[np.uint8]


def aligned_bytes(size: int, *, huge_pages: bool = False) -> ByteArray:
    """Zeroed memory at a multiple of 64 bytes, physical only where it has been written.

    Huge pages spare address lookups where all of it will be read over and over.
    """
    mapped = mmap.mmap(-1, max(size, 1))
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)[:size]


def round_up(size: int, multiple: int = CACHE_LINE) -> int:
    return -(-size // multiple) * multiple
