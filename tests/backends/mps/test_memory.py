"""Memory that GPU and CPU share: weights, buffers and KV cache in one pool, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from localllm.backends.base import MemoryInfo, ProgressFn, StepLimits  # noqa: E402
from localllm.backends.mps import backend as mps  # noqa: E402
from localllm.backends.program import KVGroup, Program  # noqa: E402
from localllm.backends.selection import Selection  # noqa: E402
from localllm.backends.torch_common.kv_cache import LayerCache  # noqa: E402
from localllm.backends.torch_common.weights import Weights  # noqa: E402
from localllm.engine import loader  # noqa: E402
from localllm.engine.core import EngineCore  # noqa: E402
from localllm.errors import InsufficientMemoryError  # noqa: E402
from localllm.gguf import Tensor  # noqa: E402
from tests.backends.mps.compiled import compiled_shaders  # noqa: E402
from tests.engine.processes import config  # noqa: E402

pytestmark = pytest.mark.torch

GB = 10**9
CONFIG = replace(config(ctx_size=256), max_num_batched_tokens=32, max_num_seqs=4)


@dataclass
class Machine:
    """Whose memory has one size, of which the GPU may take `recommended` bytes."""

    total: int = 64 * GB
    others: int = 0  # what other programs hold
    recommended: int = 48 * GB
    taken: int = 0  # by this one

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.total, self.total - self.others - self.taken)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(mps, "memory_info", machine.memory_info)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: machine.recommended)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: machine.taken)
    return machine


class CountedBackend(mps.MpsBackend):
    """On torch's CPU device, with the memory of an Apple GPU."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("float32", 1, device="cpu", shaders=compiled_shaders())
        self.machine = machine
        self.weights = self.workspace = self.cache = 0

    def memory(self) -> MemoryInfo:
        return mps.MpsBackend(device="mps").memory()

    def load(
        self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn
    ) -> Weights:
        weights = super().load(program, tensors, progress)
        matrices = [matrix.data for matrix in weights.matrices.values()]
        self.weights = _bytes([*matrices, *weights.vectors.values()])
        self.machine.taken += self.weights
        return weights

    def alloc_kv(
        self, groups: Sequence[KVGroup], n_blocks: Sequence[int]
    ) -> list[list[LayerCache]]:
        caches = super().alloc_kv(groups, n_blocks)
        rows = [rows for layers in caches for c in layers for rows in (c.keys, c.values)]
        self.cache = _bytes([r.data for r in rows])
        self.machine.taken += self.cache
        return caches

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        self.workspace = super().workspace_bytes(program, limits)
        return self.workspace


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def load(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[EngineCore, CountedBackend]:
    backend = CountedBackend(machine)
    monkeypatch.setattr(loader, "select", lambda _: Selection(backend, ""))
    machine.taken = 0
    core = loader.load_engine(replace(CONFIG, **options), lambda _: None)
    core.close()
    return core, backend


def test_the_machine_and_metal_each_set_a_limit(machine: Machine) -> None:
    backend = mps.MpsBackend(device="mps")
    machine.taken = 8 * GB
    assert backend.memory() == MemoryInfo(48 * GB, 40 * GB)
    machine.others = 30 * GB
    assert backend.memory() == MemoryInfo(48 * GB, 26 * GB)
    machine.total = 32 * GB
    machine.others = 0
    assert backend.memory() == MemoryInfo(32 * GB, 24 * GB)
    machine.recommended = 4 * GB
    assert backend.memory().available == 0
    assert mps.MpsBackend().target.dtype == torch.bfloat16


@pytest.mark.parametrize("limit", ["recommended", "total"])
def test_weights_buffers_and_cache_share_one_pool(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    core, backend = load(machine, monkeypatch)
    assert core.ready.kv_blocks == (4 * 256 // 16,)
    block = core.ready.kv_bytes // core.ready.kv_blocks[0]
    beside = backend.weights + backend.workspace
    for blocks in (
        20,
        21,
    ):  # a quarter of what is left
        setattr(machine, limit, beside + 4 * blocks * block)
        core, backend = load(machine, monkeypatch)
        assert core.ready.kv_blocks == (blocks,)
        assert backend.cache == core.ready.kv_bytes == blocks * block
        assert machine.taken + backend.workspace <= getattr(machine, limit)


def test_what_does_not_fit_is_refused_with_numbers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend = load(machine, monkeypatch)
    beside = backend.weights + backend.workspace
    machine.recommended = 100_000
    with pytest.raises(InsufficientMemoryError, match=r"for its weights; 0\.10 MB of 0\.10 MB"):
        load(machine, monkeypatch)
    machine.recommended = beside - 1
    with pytest.raises(InsufficientMemoryError, match="The buffers of a step need"):
        load(machine, monkeypatch)
    machine.recommended = beside + 2_000_000
    load(machine, monkeypatch, kv_cache_memory=2_000_000)
    with pytest.raises(InsufficientMemoryError, match="does not fit"):
        load(machine, monkeypatch, kv_cache_memory=2_000_001)
