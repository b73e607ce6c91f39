"""The threads that compute. They sleep in native code, on a pipe each, and never hold the GIL."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from localllm.backends.cpu import tape
from localllm.backends.cpu.memory import ByteArray

Int64Array = npt.NDArray[np.int64]


class Workers:
    """`threads` threads that run tapes together; the caller of `join` is one of them.

    One caller at a time: `start` and `join` in turn, from any thread.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.threads = threads
        self._control = np.zeros(tape.CONTROL_WORDS, np.int64)
        self._address = int(self._control.ctypes.data)
        self._in_use: tuple[Int64Array, ByteArray] | None = None  # by a thread that comes late
        self._control[tape.C_THREADS] = threads
        self._wake_fds = np.zeros(threads - 1, np.int64)
        self._control[tape.C_WAKE_FDS] = self._wake_fds.ctypes.data
        self._read_fds: list[int] = []
        self._pool: list[threading.Thread] = []
        self._closed = False

    def _launch(self) -> list[threading.Thread]:
        """Starts the threads, once there is something to do."""
        serve = tape.serve.compile()
        pool = []
        for tid in range(1, self.threads):
            read, self._wake_fds[tid - 1] = os.pipe()
            self._read_fds.append(read)
            name = f"localllm-cpu-{tid}"
            args = (self._address, tid, read)
            pool.append(threading.Thread(target=serve, args=args, name=name, daemon=True))
        for thread in pool:
            thread.start()
        return pool

    def start(
        self,
        table: Int64Array,
        sync: ByteArray,
        first: int,
        end: int,
        tokens: int,
        stamps: Int64Array | None = None,
    ) -> None:
        """Has the workers begin with ops first..end-1 of a step; ops before are finished.

        `table` is [ops, tape.ROW_WORDS]; `sync` has tape.SYNC_BYTES per op and starts at a cache
        line. `stamps` gets the time in nanoseconds at which each op was finished.
        """
        if self._closed:
            raise RuntimeError("the worker threads are closed")
        self._pool = self._pool or self._launch()
        self.settle()
        self._in_use = (table, sync)
        control = self._control
        control[tape.C_TABLE] = table.ctypes.data
        control[tape.C_SYNC] = sync.ctypes.data
        control[tape.C_FIRST] = first
        control[tape.C_END] = end
        control[tape.C_TOKENS] = tokens
        control[tape.C_STAMPS] = 0 if stamps is None else stamps.ctypes.data
        tape.start(self._address)

    def join(self) -> None:
        """Helps and returns when all ops are finished; some workers may not have noticed yet."""
        tape.join(self._address)

    def settle(self) -> None:
        """Waits until no worker touches what the last `start` was given."""
        tape.settle(self._address)
        self._in_use = None

    def close(self) -> None:
        """Ends the threads. Nothing may be running."""
        self._closed = True
        if not self._pool:
            return
        self.settle()
        for fd in self._wake_fds.tolist():
            os.close(fd)
        for thread in self._pool:
            thread.join()
        for fd in self._read_fds:
            os.close(fd)
        self._pool = []
