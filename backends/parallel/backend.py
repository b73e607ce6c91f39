"""Several processes as one device: each rank has a part of every layer, or some of the layers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from localllm.backends.base import MemoryInfo, ProgressFn, StepLimits
from localllm.backends.parallel.arrivals import await_ranks
from localllm.backends.parallel.crew import Crew
from localllm.backends.parallel.distributed import RankCommunicator, library
from localllm.backends.parallel.links import Link
from localllm.backends.parallel.memory import RankMemory, all_memory, check_parts_fit
from localllm.backends.parallel.messages import (
    Compile,
    Hello,
    Join,
    Load,
    Setup,
    TellMemory,
    TellWorkspace,
)
from localllm.backends.parallel.places import device_of, make_backend
from localllm.backends.parallel.ranks import Ranks
from localllm.backends.parallel.shard import Piece, divide
from localllm.backends.parallel.slices import sliced
from localllm.backends.parallel.stage import Stage
from localllm.backends.parallel.step import ParallelStep
from localllm.backends.parallel.stores import Store, found_store, keep_to_this_machine, store_of
from localllm.backends.parallel.torchrun import Torchrun
from localllm.backends.program import KVGroup, Program
from localllm.config import EngineConfig
from localllm.errors import RequestError
from localllm.gguf import GGUFFile, Tensor

_LOGIT_BYTES = 64  # that rank 0 takes for each of another rank's: copies, orders, weights, sums


@dataclass(frozen=True)
class Parts:
    """A program's weights, divided; `own` are rank 0's."""

    program: Program
    tensors: Mapping[str, Tensor]
    pieces: list[Piece]  # by rank
    own: Any


class ParallelBackend:
    """Implements `backends.base.Backend` on rank 0, with which all ranks end.

    A rank that fails or dies is told by the error of the call that needed it.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: str,
        crew: Crew,
        store: Store,
        store_port: int | None,
        torchrun: Torchrun | None,
    ) -> None:
        self._ranks = ranks = Ranks(config.tensor_parallel_size, config.pipeline_parallel_size)
        self._crew = crew
        self._kind = device
        self._parts: Parts | None = None
        with GGUFFile.open(config.model) as file:
            fingerprint = file.fingerprint()
        crew.tell_each(
            [
                Setup(config, fingerprint, device, ranks, link.rank, store_port)
                for link in crew.links
            ]
        )
        local_rank = torchrun.local_rank if torchrun else 0
        local_ranks = torchrun.local_ranks if torchrun else ranks.count
        self._own = make_backend(config, device, local_rank, local_ranks)
        self.name = self._own.name
        self.threads = self._own.threads * ranks.count
        self._hosts = [socket.gethostname()]
        for link, hello in zip(crew.links, crew.answers(), strict=True):
            assert isinstance(hello, Hello)
            link.pid, link.host = hello.pid, hello.host
            self._hosts.append(hello.host)
        crew.tell(Join())
        with crew.working():
            self._comm = RankCommunicator(ranks, 0, store, device_of(device, local_rank))
            crew.answers()
        self._own.comm = self._comm

    @classmethod
    def lead(
        cls,
        config: EngineConfig,
        device: str,
        links: Sequence[Link],
        torchrun: Torchrun | None,
    ) -> Self:
        """With the ranks at these `links`, or those that torchrun has started."""
        port: int | None = None
        store: Store
        if torchrun is None:
            keep_to_this_machine()
            founded = found_store(config.ranks)
            store, port = founded, founded.port
        elif torchrun.rank == 0:
            store = store_of(torchrun)
            links = await_ranks(store, config.ranks)
        else:
            raise RequestError(
                f"this is rank {torchrun.rank} of torchrun; `localllm serve` makes it follow rank 0"
            )
        crew = Crew(links)
        try:
            return cls(config, device, crew, store, port, torchrun)
        except BaseException:
            crew.close()
            raise

    def memory(self) -> MemoryInfo:
        return all_memory(self._memory_of_ranks())

    def describe(self) -> str:
        how = library(device_of(self._kind, 0))
        return f"{self._own.describe()}, on {self._ranks} over {how}"

    def load(self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn) -> Parts:
        pieces = self._divided(program, tensors)
        parts = [sliced(tensors, piece.slices) for piece in pieces]
        check_parts_fit(
            self._memory_of_ranks(),
            [sum(tensor.n_bytes for tensor in part.values()) for part in parts],
        )
        self._crew.tell_each([Load(piece) for piece in pieces[1:]])
        with self._crew.working():
            own = self._own.load(pieces[0].program, parts[0], progress)
            self._crew.answers()
        self._parts = Parts(program, tensors, pieces, own)
        return self._parts

    def kv_block_bytes(self, group: KVGroup) -> int:
        """On all ranks, of a program that is loaded."""
        parts = self._loaded()
        index = parts.program.kv_groups.index(group)
        own = [piece.program.kv_groups[index] for piece in parts.pieces]
        return self._ranks.count * max(self._own.kv_block_bytes(part) for part in own)

    def alloc_kv(
        self,
        groups: Sequence[KVGroup],  # noqa: ARG002 (each rank has its own)
        n_blocks: Sequence[int],
    ) -> tuple[int, ...]:
        """Each rank allocates its part when it compiles."""
        return tuple(n_blocks)

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """On all ranks, of a program that is loaded."""
        self._crew.tell(TellWorkspace(limits))
        with self._crew.working():
            own = self._own.workspace_bytes(self._loaded().pieces[0].program, limits)
            self._comm.flush()
            others = self._crew.answers()
        if self._ranks.stages > 1:
            assert program.logits is not None
            own += limits.logit_rows * program.logits.width * _LOGIT_BYTES
        return self._ranks.count * int(max(own, *others))

    def compile(
        self,
        program: Program,
        weights: Parts,
        kv: tuple[int, ...],
        limits: StepLimits,
        progress: ProgressFn,
    ) -> ParallelStep:
        pieces = weights.pieces
        if program is not weights.program:  # the same with another context
            pieces = self._divided(program, weights.tensors)
        self._crew.tell_each([Compile(piece.program, kv, limits) for piece in pieces[1:]])
        own = pieces[0].program
        with self._crew.working():
            caches = self._own.alloc_kv(own.kv_groups, kv)
            step = self._own.compile(own, weights.own, caches, limits, progress)
            self._crew.answers()
        stage = Stage(step, self._comm, self._ranks, 0, self._kind)
        return ParallelStep(program, stage, self._crew, self._comm, self._ranks.stages == 1)

    def close(self) -> None:
        self._own.close()
        self._crew.close()
        self._comm.close()

    def _divided(self, program: Program, tensors: Mapping[str, Tensor]) -> list[Piece]:
        stages = divide(program, tensors, self._ranks.tensor, self._ranks.stages)
        return [piece for stage in stages for piece in stage]

    def _loaded(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("nothing is loaded")
        return self._parts

    def _memory_of_ranks(self) -> list[RankMemory]:
        self._crew.tell(TellMemory())
        own = self._own.memory()
        found = [own, *self._crew.answers()]
        hosts = self._hosts if self._kind == "cpu" else [None] * len(found)
        return [RankMemory(info, host) for info, host in zip(found, hosts, strict=True)]
