"""Starts the engine's process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import localllm
from localllm.config import EngineConfig

_EXIT_SECONDS = 5.0


@dataclass(frozen=True)
class EngineProcess:
    """A started process and this end of the line to it."""

    popen: subprocess.Popen[bytes]
    connection: Connection[Any, Any]

    @property
    def name(self) -> str:
        return f"The engine process (pid {self.popen.pid})"

    def kill(self) -> None:
        """Ends it, if it still runs, and waits for that."""
        self.popen.kill()
        self.popen.wait()

    def how_it_ended(self) -> str:
        """For a process that closed its end of the line."""
        try:
            status = self.popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} fell silent"
        if status >= 0:
            return f"{self.name} ended with status {status}"
        hint = " (for lack of memory?)" if status == -signal.SIGKILL else ""
        return f"{self.name} was ended by {signal.Signals(-status).name}{hint}"


def start_process(config: EngineConfig) -> EngineProcess:
    """By `sys.executable -m`, never by the user's main module: works from scripts without a
    `__main__` guard, standard input and notebooks, in any folder.

    To be called by a thread that lives as long as the engine shall (see `process`).
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        popen = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "localllm.engine.process"),
                *(str(theirs.fileno()), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=_stderr(),
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the parent
        )
        connection: Connection[Any, Any] = Connection(ours.detach())
    connection.send(config)
    return EngineProcess(popen, connection)


def _stderr() -> int:
    """What a library prints must not end up in the user's own output."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _environment() -> dict[str, str]:
    """Lets the child find this package when it runs from a folder instead of being installed."""
    root = str(Path(localllm.__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
