"""Threads for work on text, so that no stream and no short request waits for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LANES = ((2**14, 2), (2**19, 1))  # bytes up to which a request goes here, and threads
_REST = 1


class Lane:
    """Where requests of one order of magnitude wait for each other."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"text-{name}")

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs what may take long (templates, tokenizing) where no stream waits for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """One lane for each order of magnitude."""

    def __init__(self) -> None:
        self._bounded = [(most, Lane(f"{most}", threads)) for most, threads in _LANES]
        self._rest = Lane("any", _REST)

    def of(self, n_bytes: int) -> Lane:
        """The lane of a request whose body has so many bytes."""
        return next((lane for most, lane in self._bounded if n_bytes <= most), self._rest)

    def close(self) -> None:
        for lane in (*(lane for _, lane in self._bounded), self._rest):
            lane.close()
