"""Apple's GPUs, by torch operations that its Metal backend has, and Metal kernels.

Not yet run on Apple hardware: tests run this class on torch's CPU device with the kernels compiled
as C++, and hold it to the operations that torch has for Metal.
"""

from __future__ import annotations

from functools import cache

import torch

from localllm.backends.base import MemoryInfo
from localllm.backends.host_memory import memory_info
from localllm.backends.mps.lower import MpsLowering
from localllm.backends.mps.shaders import source
from localllm.backends.mps.shaders.matvec import ShaderLibrary
from localllm.backends.torch_common.backend import TorchBackend
from localllm.backends.torch_common.kv_cache import LayerCache
from localllm.backends.torch_common.lower import Lowering
from localllm.backends.torch_common.weights import Weights


class MpsBackend(TorchBackend):
    """`device` is another one, and `shaders` are given, in tests alone."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        threads: int | None = None,
        *,
        kv_cache_dtype: str = "auto",
        device: str = "mps",
        shaders: ShaderLibrary | None = None,
    ) -> None:
        super().__init__(device, dtype, threads, kv_cache_dtype=kv_cache_dtype)
        self._shaders = shaders

    def memory(self) -> MemoryInfo:
        """The machine's own memory, once: the GPU shares it, up to what Metal recommends."""
        machine = memory_info()
        if self.target.device.type != "mps":
            return machine
        most = torch.mps.recommended_max_memory()
        left = max(0, most - torch.mps.driver_allocated_memory())
        return MemoryInfo(min(machine.total, most), min(machine.available, left))

    def lowering(self, weights: Weights, kv: list[list[LayerCache]]) -> Lowering:
        shaders = self._shaders or _compiled()
        return MpsLowering(self.target, weights, kv, shaders, self.comm)


@cache
def _compiled() -> ShaderLibrary:
    library: ShaderLibrary = torch.mps.compile_shader(source())
    return library
