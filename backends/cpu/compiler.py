"""Compiles the kernels that a plan needs, several at a time, each into the shared disk cache.

Most of a kernel's compile time is Python (type inference), so threads would take turns: helper
processes do it. A helper is told one kernel at a time on its standard input and answers with a
line. This process compiles what they leave undone, and a few kernels if that is all there is: a
compiler's memory is not given back, so one that is to serve had better not have been one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from localllm.backends.base import ProgressFn
from localllm.backends.cpu import cache, target
from localllm.backends.cpu.kernel import Kernel, Native, find

_KERNELS_PER_PROCESS = 3  # for fewer, starting a process costs more than it saves
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def compile_kernels(
    kernels: Sequence[Kernel | Native], processes: int, progress: ProgressFn
) -> None:
    """Compiles all of them, or reads them from disk."""
    missing = [kernel for kernel in kernels if not kernel.is_ready()]
    if missing:
        noun = "kernel" if len(missing) == 1 else "kernels"
        progress(f"compiling {len(missing)} {noun} (first run only)")
        _Compilation(missing, progress).run(min(processes, len(missing) // _KERNELS_PER_PROCESS))
    for kernel in kernels:
        kernel.compile()  # loads what a helper compiled, or left undone


class _Compilation:
    """Kernels waiting to be compiled by helpers."""

    def __init__(self, kernels: Sequence[Kernel | Native], progress: ProgressFn) -> None:
        self._waiting: queue.SimpleQueue[Kernel | Native] = queue.SimpleQueue()
        for kernel in kernels:
            self._waiting.put(kernel)
        self._total, self._finished = len(kernels), 0
        self._progress = progress
        self._lock = threading.Lock()

    def run(self, processes: int) -> None:
        helpers = [threading.Thread(target=self._feed, daemon=True) for _ in range(processes)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
        while kernel := self._next():
            kernel.compile()
            self._finish_one()

    def _feed(self) -> None:
        """Runs one helper process until no kernel is left. What it fails at stays undone."""
        command = [sys.executable, "-P", "-m", __name__, target.current(), str(cache.directory())]
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                text=True,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent
            ) as helper:
                assert helper.stdin is not None
                assert helper.stdout is not None
                while kernel := self._next():
                    print(kernel.origin.to_json(), file=helper.stdin, flush=True)
                    if not helper.stdout.readline():
                        _log.warning("a compiler process ended early; compiling without it")
                        return
                    self._finish_one()
        except OSError as error:
            _log.warning("no compiler process (%s); compiling without it", error.strerror)

    def _next(self) -> Kernel | Native | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _finish_one(self) -> None:
        with self._lock:
            self._finished += 1
            self._progress(f"compiled {self._finished} of {self._total} kernels")


def _help(isa: str, directory: str) -> None:
    """A helper's life. It ends with the parent: at once on Linux, else after a kernel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    target.use(isa)
    cache.use_directory(Path(directory))
    for line in sys.stdin:
        find(line).compile()
        try:
            print("compiled", flush=True)
        except BrokenPipeError:
            os._exit(0)  # a normal end would try to print it again


if __name__ == "__main__":
    _help(*sys.argv[1:])
