"""torch as a device: the same closures on the CPU, on NVIDIA's and on Apple's GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from localllm.backends.base import MemoryInfo, ProgressFn, StepLimits
from localllm.backends.cpu.cores import default_threads
from localllm.backends.host_memory import memory_info
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import KVGroup, Program
from localllm.backends.torch_common.kv_cache import LayerCache, block_bytes
from localllm.backends.torch_common.lower import Lowering
from localllm.backends.torch_common.step import TorchStep
from localllm.backends.torch_common.target import DTYPES, Target
from localllm.backends.torch_common.weights import Weights
from localllm.backends.torch_common.workspace import workspace_bytes
from localllm.gguf import Tensor

# Rows of one product. On the CPU what decoding needs; a GPU waits for the weights either way.
_TILE_ROWS = {"cpu": 16, "cuda": 128, "mps": 64}


class TorchBackend:
    """Implements `backends.base.Backend`. `threads` holds for the whole process.

    `comm` reaches the other ranks, where programs are parts of one.
    """

    name = "torch"

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        *,
        kv_cache_dtype: str = "auto",
        comm: Communicator | None = None,
    ) -> None:
        kind = torch.device(device).type
        self.target = Target(
            torch.device(device), DTYPES[dtype], _TILE_ROWS[kind], kv_cache_dtype == "q8_0"
        )
        self.comm = comm
        self.threads = threads or default_threads().threads
        torch.set_num_threads(self.threads)

    def memory(self) -> MemoryInfo:
        if self.target.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(self.target.device)
            return MemoryInfo(total, available)
        return memory_info()

    def describe(self) -> str:
        dtype = str(self.target.dtype).removeprefix("torch.")
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        cache = ", KV cache in q8_0" if self.target.quantized_kv else ""
        return f"torch {torch.__version__} on {self._device()}, {dtype}{cache}, {threads}"

    def load(
        self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn
    ) -> Weights:
        return Weights.load(self.target, program, tensors, progress)

    def kv_block_bytes(self, group: KVGroup) -> int:
        return sum(block_bytes(self.target, layer) for layer in group.layers)

    def alloc_kv(
        self, groups: Sequence[KVGroup], n_blocks: Sequence[int]
    ) -> list[list[LayerCache]]:
        return [
            [LayerCache.empty(self.target, layer, blocks) for layer in group.layers]
            for group, blocks in zip(groups, n_blocks, strict=True)
        ]

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        return workspace_bytes(program, limits)

    def compile(
        self,
        program: Program,
        weights: Weights,
        kv: list[list[LayerCache]],
        limits: StepLimits,
        progress: ProgressFn,  # noqa: ARG002 (closures take no time to make)
    ) -> TorchStep:
        return TorchStep(program, self.lowering(weights, kv), limits)

    def lowering(self, weights: Weights, kv: list[list[LayerCache]]) -> Lowering:
        """How ops become closures; devices with kernels of their own have their own way."""
        return Lowering(self.target, weights, kv, self.comm)

    def close(self) -> None:
        """Memory goes with the last reference."""

    def _device(self) -> str:
        device = self.target.device
        if device.type == "cuda":
            return f"{device} ({torch.cuda.get_device_name(device)})"
        return str(device)
