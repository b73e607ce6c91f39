"""Starting the other ranks on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from localllm.backends.parallel.links import Link


def start_ranks(count: int) -> list[Link]:
    """Ranks 1 to `count` - 1 as processes of this machine, which end with this one.

    To be called by a thread that lives as long as they shall.
    """
    return [_started(rank) for rank in range(1, count)]


def _started(rank: int) -> Link:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        popen = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "localllm.backends.parallel.worker"),
                *(str(theirs.fileno()), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is for the server
        )
        return Link(rank, Connection(ours.detach()), popen)
