"""Where ranks find each other."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from localllm.backends.parallel.torchrun import Torchrun
from localllm.backends.parallel.waiting import PATIENCE, Wait
from localllm.errors import EngineError, RequestError

__all__ = [
    "Store",
    "TCPStore",
    "await_key",
    "found_store",
    "keep_to_this_machine",
    "store_at",
    "store_of",
]

_LOOPBACK = "127.0.0.1"
_PAUSE_SECONDS = 0.2  # torch's own ways to wait do not hear signals
_CONNECT = timedelta(seconds=10)


def found_store(ranks: int) -> TCPStore:
    """For the ranks of this machine, and nobody beyond it."""
    return _founded(socket.create_server((_LOOPBACK, 0)), ranks)


def store_at(port: int) -> Store:
    """The one that was founded at that port of this machine."""
    keep_to_this_machine()
    return TCPStore(_LOOPBACK, port, timeout=PATIENCE)


def store_of(torchrun: Torchrun) -> Store:
    """The one that torchrun's variables name; rank 0 founds it, the others wait for it.

    RequestError where the variables do not allow it, EngineError when rank 0 does not come.
    """
    if torchrun.rank > 0 or torchrun.has_store:
        return _found_by_others(torchrun)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", torchrun.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RequestError(
            f"rank 0 cannot listen at the environment variable MASTER_PORT, {torchrun.port}: "
            f"{os.strerror(error.errno or 0)}"
        ) from error
    return _founded(listener, torchrun.world_size)


def await_key(store: Store, key: str, what: str) -> bytes:
    """The value that somebody sets; `what` they are."""
    wait = Wait()
    try:
        while not store.check([key]):
            wait.go_on(what)
            time.sleep(_PAUSE_SECONDS)
        value: bytes = store.get(key)
    except RuntimeError as error:
        raise EngineError(f"{what} is gone: {_first_line(error)}") from error
    return value


def _founded(listener: socket.socket, ranks: int) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        _LOOPBACK,
        port,
        ranks,
        is_master=True,
        timeout=PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _found_by_others(torchrun: Torchrun) -> Store:
    who = "torchrun" if torchrun.has_store else "rank 0"
    place = f"MASTER_ADDR {torchrun.address}, MASTER_PORT {torchrun.port}"
    wait = Wait()
    while (trouble := _trouble_at(torchrun.address, torchrun.port)) is not None:
        wait.go_on(f"{who} at {place} ({trouble})")
        time.sleep(_PAUSE_SECONDS)
    try:
        store = TCPStore(torchrun.address, torchrun.port, timeout=_CONNECT)
    except RuntimeError as error:
        raise EngineError(f"{who} is not what answers at {place}: {_first_line(error)}") from error
    store.set_timeout(PATIENCE)
    return store


def _trouble_at(address: str, port: int) -> str | None:
    """Why nobody can be reached there; None when somebody can."""
    try:
        socket.create_connection((address, port), _CONNECT.total_seconds()).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _first_line(error: Exception) -> str:
    """Without the stack that torch adds."""
    return str(error).partition("\n")[0]


def keep_to_this_machine() -> None:
    """gloo would listen at the address that the machine's name stands for, if it has one."""
    names = psutil.net_if_addrs().items()
    loopback = next((n for n, own in names if any(a.address == _LOOPBACK for a in own)), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
