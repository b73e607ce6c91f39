"""What a rank but 0 has: its device, its part of the model, its stage."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any, Self

from localllm.backends.parallel.distributed import RankCommunicator
from localllm.backends.parallel.messages import (
    Compile,
    Join,
    Load,
    Order,
    Run,
    Setup,
    Stop,
    TellMemory,
    TellWorkspace,
    WarmUp,
)
from localllm.backends.parallel.places import device_of, make_backend
from localllm.backends.parallel.shard import Piece
from localllm.backends.parallel.slices import sliced
from localllm.backends.parallel.stage import Stage
from localllm.backends.parallel.stores import Store, store_at
from localllm.backends.parallel.wire import unpack
from localllm.config import EngineConfig
from localllm.errors import ModelError
from localllm.gguf import GGUFFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a rank is: which one of its machine, what it was started with, where ranks meet.

    Of its own `config` only the model's path counts: the rest is as rank 0 says.
    """

    local_rank: int
    local_ranks: int
    config: EngineConfig
    store: Store

    @classmethod
    def beside_rank_0(cls, setup: Setup) -> Self:
        assert setup.store_port is not None
        return cls(setup.rank, setup.ranks.count, setup.config, store_at(setup.store_port))


class Rank:
    """ModelError where its file is not the model that rank 0 has."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self._setup = setup
        self._place = place
        self._check_model()
        if differences := _differences(place.config, setup.config):
            _log.warning("rank %d goes by rank 0's %s", setup.rank, ", ".join(differences))
        self._backend = make_backend(
            setup.config, setup.device, place.local_rank, place.local_ranks
        )
        # In the order in which they come to be.
        self._comm: RankCommunicator
        self._piece: Piece
        self._weights: Any
        self._stage: Stage

    def obey(self, order: Order) -> object:
        """Returns the answer."""
        match order:
            case Run(plan):
                self._stage.run(unpack(plan))
            case Join():
                self._join()
            case TellMemory():
                return self._backend.memory()
            case Load(piece):
                self._load(piece)
            case TellWorkspace(limits):
                taken = self._backend.workspace_bytes(self._piece.program, limits)
                self._comm.flush()
                return taken
            case Compile():
                self._compile(order)
            case WarmUp():
                self._stage.step.warmup()
                self._comm.flush()
            case Setup() | Stop():
                raise ValueError(f"{order} comes out of turn")
        return None

    def _check_model(self) -> None:
        own, rank_0s = self._place.config.model, self._setup.config.model
        with GGUFFile.open(own) as file:
            if file.fingerprint() != self._setup.fingerprint:
                raise ModelError(f"{own} is not the model that rank 0 has in {rank_0s}")

    def _join(self) -> None:
        device = device_of(self._setup.device, self._place.local_rank)
        ranks, rank = self._setup.ranks, self._setup.rank
        self._comm = RankCommunicator(ranks, rank, self._place.store, device)
        self._backend.comm = self._comm

    def _load(self, piece: Piece) -> None:
        self._piece = piece
        with GGUFFile.open(self._place.config.model) as file:
            tensors = sliced(file.tensors, piece.slices)
            self._weights = self._backend.load(piece.program, tensors, _ignore)

    def _compile(self, order: Compile) -> None:
        setup, program = self._setup, order.program
        kv = self._backend.alloc_kv(program.kv_groups, order.n_blocks)
        step = self._backend.compile(program, self._weights, kv, order.limits, _ignore)
        self._stage = Stage(step, self._comm, setup.ranks, setup.rank, setup.device)


def _differences(own: EngineConfig, rank_0s: EngineConfig) -> list[str]:
    """What rank 0 was told otherwise than this rank was; what this one was not told is none."""
    found = []
    for option in fields(EngineConfig):
        ours, theirs = getattr(own, option.name), getattr(rank_0s, option.name)
        if option.name != "model" and ours not in (theirs, option.default):
            found.append(f"{option.name} {theirs}, not by its own {ours}")
    return found


def _ignore(_line: str) -> None:
    """Rank 0 says the same."""
