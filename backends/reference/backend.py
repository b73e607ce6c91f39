"""The reference backend's side of the interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from localllm.backends.base import BLOCK_TOKENS, MemoryInfo, ProgressFn, StepLimits
from localllm.backends.program import FloatArray, KVGroup, Program
from localllm.backends.reference.attention import LayerCache
from localllm.backends.reference.step import ReferenceStep
from localllm.gguf import Tensor

_FLOAT_BYTES = 4


class DequantizedWeights(Mapping[str, FloatArray]):
    """The named tensors in float32, each converted when it is first asked for, then kept."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._tensors = {name: tensors[name] for name in names}
        self._arrays: dict[str, FloatArray] = {}

    def __getitem__(self, name: str) -> FloatArray:
        if name not in self._arrays:
            self._arrays[name] = self._tensors[name].dequantize()
            self._tensors[name].drop_pages()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class ReferenceBackend:
    name = "reference"
    threads = 1

    def memory(self) -> MemoryInfo:
        import psutil  # late: the operations are used where it is missing

        memory = psutil.virtual_memory()
        return MemoryInfo(total=memory.total, available=memory.available)

    def describe(self) -> str:
        return "numpy in float32, slow: an oracle for tests"

    def load(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        progress: ProgressFn,  # noqa: ARG002 (nothing takes time yet)
    ) -> DequantizedWeights:
        return DequantizedWeights(tensors, program.weights())

    def kv_block_bytes(self, group: KVGroup) -> int:
        return sum(
            BLOCK_TOKENS * layer.kv_heads * (layer.key_dim + layer.value_dim) * _FLOAT_BYTES
            for layer in group.layers
        )

    def alloc_kv(
        self, groups: Sequence[KVGroup], n_blocks: Sequence[int]
    ) -> list[list[LayerCache]]:
        return [
            [LayerCache.empty(layer, blocks) for layer in group.layers]
            for group, blocks in zip(groups, n_blocks, strict=True)
        ]

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """An upper bound: buffers are freed after their last use."""
        rows = {"T": limits.tokens, "R": limits.logit_rows}
        return sum(width * rows[kind] * _FLOAT_BYTES for width, kind in program.buffers)

    def compile(
        self,
        program: Program,
        weights: DequantizedWeights,
        kv: list[list[LayerCache]],
        limits: StepLimits,  # noqa: ARG002 (buffers are made as they are needed)
        progress: ProgressFn,  # noqa: ARG002
    ) -> ReferenceStep:
        return ReferenceStep(program, weights, kv)

    def close(self) -> None:
        """Memory goes with the last reference."""
