"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merge(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Items of all streams as they come, in order within each stream.

    The first error of any of them ends all. However this ends, every stream is closed.
    """
    if len(streams) == 1:  # spares the hot path a task switch per item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    items: asyncio.Queue[_T | _Ended] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, items)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            got = await items.get()
            if not isinstance(got, _Ended):
                yield got
            elif got.error is None:
                open_streams -= 1
            else:
                raise got.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Ended:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[_T, None], items: asyncio.Queue[_T | _Ended]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait(item)
    except Exception as error:
        items.put_nowait(_Ended(error))
    else:
        items.put_nowait(_Ended())
