"""The process of a rank but 0: `python -m localllm.backends.parallel.worker FD RANK_0`.

FD is one end of a socket pair, whose other end the process RANK_0 has. This one does as it is told
until it is told to stop; it ends at once when rank 0 does, and when it cannot do something.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from localllm.backends.parallel.communicator import UnreachableError
from localllm.backends.parallel.messages import Answer, Done, Failed, Hello, Order, Run, Setup, Stop
from localllm.child_process import tie_to_parent
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.backends.parallel.rank import Place
    from localllm.backends.parallel.torchrun import Torchrun
    from localllm.config import EngineConfig

_NAME = "localllm-rank"
_FAILED = 1

ToRank0: TypeAlias = "Connection[Answer, Order]"

_log = logging.getLogger(__name__)


def main() -> None:
    tie_to_parent(_NAME, int(sys.argv[2]))
    logging.basicConfig(level=logging.WARNING, format=f"{_NAME}: %(message)s")
    work(Connection(int(sys.argv[1])))


def follow(torchrun: Torchrun, config: EngineConfig) -> NoReturn:
    """Makes this process, which somebody else has started, the rank that it was started as."""
    # At once: Python's own handler would wait until a library has done what it does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what it says is raised too
    from localllm.backends.parallel.arrivals import arrive
    from localllm.backends.parallel.rank import Place
    from localllm.backends.parallel.stores import store_of

    store = store_of(torchrun)
    place = Place(torchrun.local_rank, torchrun.local_ranks, config, store)
    work(arrive(store, torchrun), place)


def work(connection: ToRank0, place: Place | None = None) -> NoReturn:
    """`place` is None where rank 0 has started the process."""
    orders = Orders(connection)
    name = "this rank"
    try:
        from localllm.backends.parallel.rank import Place, Rank  # slow, with rank 0 watched already

        setup = orders.next()
        assert isinstance(setup, Setup)
        name = f"rank {setup.rank}"
        rank = Rank(setup, place or Place.beside_rank_0(setup))
        connection.send(Done(Hello(os.getpid(), socket.gethostname())))
        while not isinstance(order := orders.next(), Stop):
            answer = rank.obey(order)
            if not isinstance(order, Run):
                connection.send(Done(answer))
    except Exception as error:
        if isinstance(error, LocalLLMError | UnreachableError):
            _log.info("%s: %s", name, error)
        else:
            traceback.print_exc()
        with suppress(OSError):
            connection.send(Failed.of(error))
        os._exit(_FAILED)
    os._exit(0)  # nobody waits for what a library does at the end


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
        order: Order | None = None
        while True:
            try:
                order = self._connection.recv()
            except (EOFError, OSError):
                if isinstance(order, Stop):
                    os._exit(0)
                _log.info("rank 0 is gone")
                os._exit(_FAILED)
            except Exception as error:  # of what the bytes stand for
                self._orders.put(error)
            else:
                self._orders.put(order)


if __name__ == "__main__":
    main()
