"""Where ranks find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from localllm.errors import EngineError

__all__ = ["Store", "TCPStore", "found_store", "keep_to_this_machine", "store_of"]

PATIENCE = timedelta(seconds=300)  # for ranks that are started at other times
_LOOPBACK = "127.0.0.1"


def found_store(ranks: int) -> TCPStore:
    """For the ranks of this machine, and nobody beyond it."""
    listener = socket.create_server((_LOOPBACK, 0))
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


def store_of(port: int | None) -> Store:
    """The one that was founded at that port of this machine, or that torchrun's variables name.

    EngineError when not all ranks that torchrun's variables speak of come there.
    """
    try:
        if port is not None:
            keep_to_this_machine()
            return TCPStore(_LOOPBACK, port, timeout=PATIENCE)
        found = cast(Iterator[tuple[Store, int, int]], rendezvous("env://", timeout=PATIENCE))
        return next(found)[0]
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"the ranks do not meet: {error}") from error


def keep_to_this_machine() -> None:
    """gloo would listen at the address that the machine's name stands for, if it has one."""
    names = psutil.net_if_addrs().items()
    loopback = next((n for n, own in names if any(a.address == _LOOPBACK for a in own)), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
