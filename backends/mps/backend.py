"""Apple's GPUs, by torch operations that its Metal backend has.

Not yet run on Apple hardware: tests run this class on torch's CPU device, and hold the list of the
operations that it uses.
"""

from __future__ import annotations

import torch

from localllm.backends.base import MemoryInfo
from localllm.backends.host_memory import memory_info
from localllm.backends.torch_common.backend import TorchBackend


class MpsBackend(TorchBackend):
    """`device` is another one in tests alone."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        threads: int | None = None,
        *,
        kv_cache_dtype: str = "auto",
        device: str = "mps",
    ) -> None:
        super().__init__(device, dtype, threads, kv_cache_dtype=kv_cache_dtype)

    def memory(self) -> MemoryInfo:
        """The machine's own memory, once: the GPU shares it, up to what Metal recommends."""
        machine = memory_info()
        if self.target.device.type != "mps":
            return machine
        most = torch.mps.recommended_max_memory()
        left = max(0, most - torch.mps.driver_allocated_memory())
        return MemoryInfo(min(machine.total, most), min(machine.available, left))
