"""The memory of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu.kernels.kv import group_block_bytes, layer_offset
from localllm.backends.cpu.memory import ByteArray, aligned_bytes
from localllm.backends.program import KVGroup


@dataclass(frozen=True)
class KVCache:
    """One group's blocks; physical memory follows as blocks are first written."""

    group: KVGroup
    n_blocks: int
    memory: ByteArray

    @classmethod
    def allocate(cls, group: KVGroup, n_blocks: int) -> KVCache:
        return cls(group, n_blocks, aligned_bytes(n_blocks * group_block_bytes(group)))

    def layer_address(self, layer: int) -> int:
        return int(self.memory.ctypes.data) + layer_offset(self.group, layer)
