"""NVIDIA GPUs as a device: quantized weights, Triton kernels, CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence

import torch
import triton

from localllm.backends.base import MemoryInfo, ProgressFn, StepLimits
from localllm.backends.cuda.caches import Q8_0, Caches, block_bytes
from localllm.backends.cuda.lower import Lowering
from localllm.backends.cuda.memory import device_memory, peak_bytes, tells_shortage_at_load
from localllm.backends.cuda.step import CudaStep
from localllm.backends.cuda.weights import Weights
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import KVGroup, Program
from localllm.backends.torch_common.target import DTYPES
from localllm.backends.torch_common.workspace import workspace_bytes
from localllm.gguf import Tensor


class CudaBackend:
    """Implements `backends.base.Backend`.

    Matrices are multiplied, and keys and values kept, in `dtype`; `kv_cache_dtype` q8_0 keeps the
    latter in 8 bits. `fast` lets the bits of an answer depend on the batch. On the device "cpu"
    the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which is for tests. `comm` reaches
    the other ranks, where programs are parts of one.
    """

    name = "cuda"
    threads = 1

    def __init__(
        self,
        dtype: str = "bfloat16",
        device: str = "cuda",
        fast: bool = False,
        kv_cache_dtype: str = "auto",
        *,
        comm: Communicator | None = None,
    ) -> None:
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.fast = fast
        self.comm = comm
        self._kv_dtype = Q8_0 if kv_cache_dtype == "q8_0" else self.dtype
        self._loaded: weakref.WeakKeyDictionary[Program, Weights] = weakref.WeakKeyDictionary()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def memory(self) -> MemoryInfo:
        return device_memory(self.device)

    def describe(self) -> str:
        parts = [str(self.dtype).removeprefix("torch.")]
        if self._kv_dtype == Q8_0:
            parts.append("KV cache q8_0")
        if self.fast:
            parts.append("fast")
        versions = f"torch {torch.__version__}, Triton {triton.__version__}"
        return f"{self._device_name()}, {', '.join(parts)}, {versions}"

    @tells_shortage_at_load
    def load(
        self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn
    ) -> Weights:
        weights = Weights.load(self.device, self.dtype, program, tensors, progress)
        self._loaded[program] = weights
        return weights

    def kv_block_bytes(self, group: KVGroup) -> int:
        return block_bytes(group, self._kv_dtype)

    @tells_shortage_at_load
    def alloc_kv(self, groups: Sequence[KVGroup], n_blocks: Sequence[int]) -> Caches:
        return Caches.empty(groups, n_blocks, self._kv_dtype, self.device)

    @tells_shortage_at_load
    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """Measured: the largest steps are run. The program has to be loaded."""
        if self.device.type != "cuda":
            return workspace_bytes(program, limits)
        weights = self._loaded[program]

        def largest_steps() -> None:
            caches = Caches.empty(
                program.kv_groups, [0] * len(program.kv_groups), self._kv_dtype, self.device
            )
            self._step(program, weights, caches, limits).fill()

        taken = peak_bytes(self.device, largest_steps)
        gc.collect()
        torch.cuda.empty_cache()
        return taken

    @tells_shortage_at_load
    def compile(
        self,
        program: Program,
        weights: Weights,
        kv: Caches,
        limits: StepLimits,
        progress: ProgressFn,  # noqa: ARG002 (kernels compile when they are first launched)
    ) -> CudaStep:
        return self._step(program, weights, kv, limits)

    def close(self) -> None:
        """Memory goes with the last reference."""

    def _step(
        self, program: Program, weights: Weights, caches: Caches, limits: StepLimits
    ) -> CudaStep:
        lowering = Lowering(
            program,
            weights,
            caches.layers,
            self.dtype,
            self.device,
            positions=limits.context,
            logit_rows=limits.logit_rows,
            fast=self.fast,
        )
        return CudaStep(program, lowering, caches, limits, self.device, self.comm)

    def _device_name(self) -> str:
        if self.device.type != "cuda":
            return f"{self.device} (interpreted)"
        gigabytes = torch.cuda.get_device_properties(self.device).total_memory / 1e9
        return f"{self.device} ({torch.cuda.get_device_name(self.device)}, {gigabytes:.0f} GB)"
