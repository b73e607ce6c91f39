"""Compiles the kernels that a plan needs, several at a time, each in the shared disk cache.

Most of a kernel's compile time is Python (type inference), so threads would take turns: helpers
are processes. Each is told one kernel at a time on its standard input and answers with a line.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from localllm.backends.base import ProgressFn
from localllm.backends.cpu import cache, target
from localllm.backends.cpu.kernel import Kernel, find_kernel

_FEWEST_FOR_HELPERS = 3  # below this, starting a process costs more than it saves
_log = logging.getLogger(__name__)


def compile_kernels(kernels: Sequence[Kernel], processes: int, progress: ProgressFn) -> None:
    """Makes every kernel's `address` cheap to ask for."""
    missing = [kernel for kernel in kernels if not kernel.is_ready()]
    if missing:
        noun = "kernel" if len(missing) == 1 else "kernels"
        progress(f"compiling {len(missing)} {noun} (first run only)")
    if len(missing) >= _FEWEST_FOR_HELPERS and processes > 1:
        _compile_in_helpers(missing, min(processes, len(missing)), progress)
    for kernel in kernels:
        kernel.address  # noqa: B018  # loads it, or compiles what no helper did


def _compile_in_helpers(kernels: Sequence[Kernel], processes: int, progress: ProgressFn) -> None:
    waiting: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    done: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    feeders = [
        threading.Thread(target=_feed, args=(waiting, done), daemon=True) for _ in range(processes)
    ]
    for feeder in feeders:
        feeder.start()
    finished, running = 0, processes
    while running:
        if done.get() is None:
            running -= 1
            continue
        finished += 1
        progress(f"compiled {finished} of {len(kernels)} kernels")
    for feeder in feeders:
        feeder.join()


def _feed(waiting: queue.SimpleQueue[Kernel], done: queue.SimpleQueue[str | None]) -> None:
    """Runs one helper until no kernel is left. A helper that dies leaves its kernel to us."""
    command = [sys.executable, "-m", __name__, target.current(), str(cache.directory())]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            while True:
                kernel = waiting.get_nowait()
                print(kernel.origin.to_json(), file=helper.stdin, flush=True)
                if not helper.stdout.readline():
                    _log.warning("a compiler process ended early; compiling in this one")
                    break
                done.put(kernel.name)
    except (queue.Empty, OSError):
        pass
    finally:
        done.put(None)


def _help(isa: str, directory: str) -> None:
    """A helper's life."""
    target.use(isa)
    cache.use_directory(Path(directory))
    for line in sys.stdin:
        find_kernel(line).address  # noqa: B018  # compiles and saves it
        print("compiled", flush=True)


if __name__ == "__main__":
    _help(*sys.argv[1:])
