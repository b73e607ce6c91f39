"""Meeting ranks that somebody else has started."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, SimpleQueue
from typing import Any

from localllm.backends.parallel.links import Link
from localllm.backends.parallel.stores import PATIENCE, Store
from localllm.backends.parallel.torchrun import Torchrun
from localllm.errors import EngineError

_CONTROL = "localllm/control"  # in the store: where rank 0 listens, and the key that opens it


def await_ranks(store: Store, count: int) -> list[Link]:
    """Ranks that somebody else starts, as they come; each says which one it is.

    Who can read the store can be one of them.
    """
    with _arrivals(store, count) as arrivals:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        found: dict[int, Link] = {}
        while len(found) < count - 1:
            try:
                rank, connection = arrivals.get(timeout=max(0, deadline - time.monotonic()))
            except Empty:
                missing = sorted(set(range(1, count)) - set(found))
                raise EngineError(
                    f"rank {missing[0]} has not come in {PATIENCE.total_seconds():.0f} s"
                ) from None
            found[rank] = Link(rank, connection)
    return [found[rank] for rank in sorted(found)]


@contextmanager
def _arrivals(store: Store, count: int) -> Iterator[SimpleQueue[tuple[int, Connection[Any, Any]]]]:
    key = secrets.token_bytes(32)
    listener = Listener(("", 0), authkey=key)
    arrivals: SimpleQueue[tuple[int, Connection[Any, Any]]] = SimpleQueue()

    def accept() -> None:
        ranks: set[int] = set()
        while len(ranks) < count - 1:
            try:
                connection = listener.accept()
                rank = int(connection.recv())
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # somebody else's
            ranks.add(rank)
            arrivals.put((rank, connection))

    threading.Thread(target=accept, name="localllm-arrivals", daemon=True).start()
    store.set(_CONTROL, json.dumps({"port": listener.address[1], "key": key.hex()}))
    try:
        yield arrivals
    finally:
        listener.close()


def arrive(store: Store, torchrun: Torchrun) -> Connection[Any, Any]:
    """The line of a rank that somebody else has started to rank 0."""
    control = json.loads(store.get(_CONTROL))
    key = bytes.fromhex(control["key"])
    connection = Client((torchrun.address, control["port"]), authkey=key)
    connection.send(torchrun.rank)
    return connection
