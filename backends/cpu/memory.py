"""Memory for the kernels: aligned blocks, and how much the machine has to give."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from localllm.backends.base import MemoryInfo
from localllm.backends.cpu import cgroup
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


def memory_info(root: Path = Path("/")) -> MemoryInfo:
    """The machine's memory, or what its control groups leave of it."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in cgroup.memory(root):
        if limit < machine.total:
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return MemoryInfo(total, available)
