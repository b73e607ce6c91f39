"""How much memory the machine has to give."""

from __future__ import annotations

from pathlib import Path

from localllm.backends.base import MemoryInfo
from localllm.backends.cpu import cgroup


def memory_info(root: Path = Path("/")) -> MemoryInfo:
    """The machine's memory, or what its control groups leave of it."""
    import psutil  # late: whoever computes on a GPU may do without

    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in cgroup.memory(root):
        if limit < machine.total:
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return MemoryInfo(total, available)
