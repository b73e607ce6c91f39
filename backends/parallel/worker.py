"""The process of a rank but 0: `python -m localllm.backends.parallel.worker FD`.

FD is one end of a socket pair, whose other end rank 0 has. The process does as it is told until it
is told to stop; it ends at once when rank 0 does, and when it cannot do something.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from localllm.backends.parallel.messages import (
    Answer,
    Compile,
    Done,
    Failed,
    Hello,
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
from localllm.child_process import tie_to_parent
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.backends.parallel.distributed import RankCommunicator
    from localllm.backends.parallel.shard import Piece
    from localllm.backends.parallel.stage import Stage
    from localllm.backends.parallel.stores import Store
    from localllm.backends.parallel.torchrun import Torchrun

_NAME = "localllm-rank"
_FAILED = 1

ToRank0: TypeAlias = "Connection[Answer, Order]"


def main() -> None:
    tie_to_parent(_NAME)
    logging.basicConfig(level=logging.WARNING, format=f"{_NAME}: %(message)s")
    work(Connection(int(sys.argv[1])))


def follow(torchrun: Torchrun, model: Path) -> NoReturn:
    """Makes this process, which somebody else has started, the rank that it was started as."""
    from localllm.backends.parallel.spawn import arrive
    from localllm.backends.parallel.stores import store_of

    store = store_of(None)
    place = Place(torchrun.local_rank, torchrun.local_ranks, model, store)
    work(arrive(store, torchrun), place)


def work(connection: ToRank0, place: Place | None = None) -> NoReturn:
    """`place` is None where rank 0 has started the process."""
    orders = Orders(connection)
    try:
        setup = orders.next()
        assert isinstance(setup, Setup)
        rank = Rank(setup, place or Place.beside_rank_0(setup))
        connection.send(Done(Hello(os.getpid(), socket.gethostname())))
        while not isinstance(order := orders.next(), Stop):
            answer = rank.obey(order)
            if not isinstance(order, Run):
                connection.send(Done(answer))
    except Exception as error:
        if not isinstance(error, LocalLLMError):
            traceback.print_exc()
        with suppress(OSError):
            connection.send(Failed.of(error))
        os._exit(_FAILED)
    os._exit(0)  # nobody waits for what a library does at the end


@dataclass(frozen=True)
class Place:
    """Where a rank is: which one of its machine, the model's file there, and where ranks meet."""

    local_rank: int
    local_ranks: int
    model: Path
    store: Store

    @classmethod
    def beside_rank_0(cls, setup: Setup) -> Place:
        from localllm.backends.parallel.stores import store_of

        store = store_of(setup.store_port)
        return cls(setup.rank, setup.ranks.count, setup.config.model, store)


class Orders:
    """Reads what rank 0 says in a thread of its own, which ends the process with rank 0."""

    def __init__(self, connection: ToRank0) -> None:
        self._connection = connection
        self._orders: SimpleQueue[Order | Exception] = SimpleQueue()
        threading.Thread(target=self._read, name="localllm-orders", daemon=True).start()

    def next(self) -> Order:
        order = self._orders.get()
        if isinstance(order, Exception):
            raise order
        return order

    def _read(self) -> None:
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                os._exit(_FAILED)
            except Exception as error:  # of what the bytes stand for
                self._orders.put(error)
            else:
                self._orders.put(order)


class Rank:
    """What a rank has: its device, its part of the model, its stage."""

    def __init__(self, setup: Setup, place: Place) -> None:
        from localllm.backends.parallel.places import make_backend

        self._setup = setup
        self._place = place
        self._backend = make_backend(
            setup.config, setup.device, place.local_rank, place.local_ranks
        )
        self._comm: RankCommunicator
        self._piece: Piece
        self._weights: Any
        self._stage: Stage

    def obey(self, order: Order) -> object:
        """Returns the answer."""
        match order:
            case Run(plan):
                self._run(plan)
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

    def _join(self) -> None:
        from localllm.backends.parallel.distributed import RankCommunicator
        from localllm.backends.parallel.places import device_of

        device = device_of(self._setup.device, self._place.local_rank)
        self._comm = RankCommunicator(
            self._setup.ranks, self._setup.rank, self._place.store, device
        )
        self._backend.comm = self._comm

    def _load(self, piece: Piece) -> None:
        from localllm.backends.parallel.slices import sliced
        from localllm.gguf import GGUFFile

        self._piece = piece
        with GGUFFile.open(self._place.model) as file:
            tensors = sliced(file.tensors, piece.slices)
            self._weights = self._backend.load(piece.program, tensors, _ignore)

    def _compile(self, order: Compile) -> None:
        from localllm.backends.parallel.stage import Stage

        setup, program = self._setup, order.program
        kv = self._backend.alloc_kv(program.kv_groups, order.n_blocks)
        step = self._backend.compile(program, self._weights, kv, order.limits, _ignore)
        self._stage = Stage(step, self._comm, setup.ranks, setup.rank, setup.device)

    def _run(self, plan: bytes) -> None:
        from localllm.backends.parallel.wire import unpack

        self._stage.run(unpack(plan))


def _ignore(_line: str) -> None:
    """Rank 0 says the same."""


if __name__ == "__main__":
    main()
