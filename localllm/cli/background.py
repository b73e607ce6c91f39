"""An event loop on a thread of its own, for a main thread that has to block on the terminal."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class Background:
    """A context manager. Its methods are called from other threads, and block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, which is cancelled when the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, stream: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """Items as they come. When the iterator is closed the stream is, before this returns."""
        items: queue.SimpleQueue[_T | _End] = queue.SimpleQueue()
        pump = self.run(_start(_pump(stream, items)))
        try:
            while not isinstance(item := items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            self.run(_stop(pump))


class _End:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[_T, None], items: queue.SimpleQueue[_T | _End]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                items.put(item)
    except Exception as error:
        items.put(_End(error))
    else:
        items.put(_End())


async def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
