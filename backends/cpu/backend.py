"""The CPU as a device: compiled kernels, one native call per thread and step."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Mapping, Sequence

from localllm.backends.base import MemoryInfo, ProgressFn, StepLimits
from localllm.backends.cpu import batch, cores, fusion, tape, target
from localllm.backends.cpu.compiler import compile_kernels
from localllm.backends.cpu.fusion import Fusions
from localllm.backends.cpu.kernel import Kernel, Native
from localllm.backends.cpu.kernels.kv import group_block_bytes
from localllm.backends.cpu.kv_cache import KVCache
from localllm.backends.cpu.lower import lower
from localllm.backends.cpu.step import CpuStep
from localllm.backends.cpu.weights import Weights
from localllm.backends.cpu.workers import Workers
from localllm.backends.host_memory import memory_info
from localllm.backends.program import KVGroup, Program
from localllm.gguf import Tensor

_SMALLEST = StepLimits(tokens=1, seqs=1, logit_rows=1, context=1)  # kernels are the same for all


class CpuBackend:
    """Implements `backends.base.Backend`. `isa` holds for the whole process."""

    name = "cpu"

    def __init__(self, threads: int | None = None, isa: str = "auto") -> None:
        self.isa = target.current() if isa == "auto" else target.use(isa)
        choice = cores.default_threads()
        self.threads = threads or choice.threads
        self._cores = choice.threads
        self._why = choice.why if threads is None else "as asked"
        self._workers = Workers(self.threads)
        self._loaded: weakref.WeakKeyDictionary[Program, Weights] = weakref.WeakKeyDictionary()

    def memory(self) -> MemoryInfo:
        return memory_info()

    def describe(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''} ({self._why})"
        return f"{_processor()}, {self.isa}, {threads}"

    def load(
        self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn
    ) -> Weights:
        """Compiles on the way, since packing needs kernels and what a step needs is known."""
        weights = Weights(program, tensors)
        self._loaded[program] = weights
        plan = lower(program, weights, _SMALLEST, self.threads).builder.plan
        # What takes long comes late in a step: begun first, it leaves no process alone at the end.
        kernels: list[Kernel | Native] = [*batch.NATIVES, *reversed(plan.kernels())]
        kernels += [*tape.NATIVES, *weights.pack_kernels()]
        compile_kernels(kernels, self._cores, progress)
        weights.pack(self.threads, progress)
        return weights

    def kv_block_bytes(self, group: KVGroup) -> int:
        return group_block_bytes(group)

    def alloc_kv(self, groups: Sequence[KVGroup], n_blocks: Sequence[int]) -> list[KVCache]:
        return [KVCache.allocate(*pair) for pair in zip(groups, n_blocks, strict=True)]

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """Depends on the weights' formats, so the program has to be loaded."""
        if program not in self._loaded:
            raise ValueError("load the program's weights before asking for its workspace")
        lowered = lower(program, self._loaded[program], limits, self.threads)
        return lowered.builder.plan.workspace_bytes

    def compile(
        self,
        program: Program,
        weights: Weights,
        kv: list[KVCache],
        limits: StepLimits,
        progress: ProgressFn,
    ) -> CpuStep:
        def make(fusions: Fusions | None, unfused: Callable[[], CpuStep] | None) -> CpuStep:
            lowered = lower(program, weights, limits, self.threads, fusions)
            lowered.builder.caches = kv
            compile_kernels(lowered.builder.plan.kernels(), self._cores, progress)
            return CpuStep(lowered, limits, self._workers, unfused)

        return make(None, lambda: make(fusion.NONE, None))

    def close(self) -> None:
        self._workers.close()


def _processor() -> str:
    """The processor's name for people, such as "AMD Ryzen 7 5800X 8-Core Processor"."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
