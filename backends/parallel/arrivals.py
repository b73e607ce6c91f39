"""Meeting ranks that somebody else has started."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, SimpleQueue
from typing import Any

from localllm.backends.parallel.links import Link
from localllm.backends.parallel.stores import Store, await_key
from localllm.backends.parallel.torchrun import Torchrun
from localllm.backends.parallel.waiting import Wait
from localllm.errors import EngineError, RequestError

# In the store: where rank 0 listens, the key that opens it, and the number of ranks.
_CONTROL = "localllm/control"
_PAUSE_SECONDS = 1.0


def await_ranks(store: Store, count: int) -> list[Link]:
    """Ranks that somebody else starts, as they come; each says which one it is.

    Who can read the store can be one of them.
    """
    with _arrivals(store, count) as arrivals:
        wait = Wait()
        found: dict[int, Link] = {}
        while missing := sorted(set(range(1, count)) - set(found)):
            try:
                rank, connection = arrivals.get(timeout=_PAUSE_SECONDS)
            except Empty:
                ranks = "rank" if len(missing) == 1 else "ranks"
                wait.go_on(f"{ranks} {', '.join(map(str, missing))} of {count}")
                continue
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
            except OSError:
                return  # not all came, and nobody waits any more
            ranks.add(rank)
            arrivals.put((rank, connection))

    threading.Thread(target=accept, name="localllm-arrivals", daemon=True).start()
    store.set(_CONTROL, json.dumps({"port": listener.address[1], "key": key.hex(), "ranks": count}))
    try:
        yield arrivals
    finally:
        listener.close()


def arrive(store: Store, torchrun: Torchrun) -> Connection[Any, Any]:
    """The line of a rank that somebody else has started to rank 0."""
    control = json.loads(await_key(store, _CONTROL, "rank 0"))
    if control["ranks"] != torchrun.world_size:
        raise RequestError(
            f"the environment variable WORLD_SIZE is {torchrun.world_size}, and rank 0's is "
            f"{control['ranks']}"
        )
    try:
        address = torchrun.address, control["port"]
        connection = Client(address, authkey=bytes.fromhex(control["key"]))
        connection.send(torchrun.rank)
    except (AuthenticationError, EOFError, OSError) as error:
        raise EngineError(f"rank 0 is not reached: {error}") from error
    return connection
