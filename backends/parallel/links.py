"""Rank 0's line to one other rank."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from localllm.backends.parallel.messages import Done

_EXIT_SECONDS = 2.0


@dataclass(eq=False)
class Link:
    """`popen` is the process where it is one of this machine that rank 0 started.

    `answers` gets None when the ranks are lost.
    """

    rank: int
    connection: Connection[Any, Any]
    popen: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    host: str = ""
    answers: SimpleQueue[Done | None] = field(default_factory=SimpleQueue)

    @property
    def name(self) -> str:
        pid = self.popen.pid if self.popen is not None else self.pid
        where = "" if self.popen is not None or not self.host else f" on {self.host}"
        return f"rank {self.rank} (pid {pid}{where})" if pid else f"rank {self.rank}"

    def how_it_ended(self) -> str:
        """For a process that closed its end of the line."""
        if self.popen is None:
            return f"{self.name} is gone"
        try:
            status = self.popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} fell silent"
        if status >= 0:
            return f"{self.name} ended with status {status}"
        hint = " (for lack of memory?)" if status == -signal.SIGKILL else ""
        return f"{self.name} was ended by {signal.Signals(-status).name}{hint}"

    def end(self, patience: float) -> None:
        """Gives the process so many seconds to end by itself."""
        if self.popen is not None:
            try:
                self.popen.wait(patience)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self.connection.close()
