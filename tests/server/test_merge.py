"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from localllm.server.merge import merge

pytestmark = pytest.mark.anyio


class Source:
    """A stream of `items`, then `error`; waits for `go` before its last item."""

    def __init__(self, *items: int, error: Exception | None = None, held: bool = False) -> None:
        self.items, self.error = items, error
        self.go = asyncio.Event()
        self.closed = False
        if not held:
            self.go.set()

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items[:-1]:
                yield item
            await self.go.wait()
            for item in self.items[-1:]:
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_items_come_in_the_order_of_each_stream() -> None:
    sources = [Source(1, 2, 3), Source(), Source(10, 20)]
    items = [item async for item in merge([source.stream() for source in sources])]
    assert sorted(items) == [1, 2, 3, 10, 20]
    assert [i for i in items if i < 10] == [1, 2, 3]
    assert [i for i in items if i >= 10] == [10, 20]
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_an_error_ends_all(others: int) -> None:
    sources = [Source(1, 2, held=True) for _ in range(others)]
    sources.append(Source(5, error=ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_closes_all(n: int) -> None:
    sources = [Source(1, 2, held=True) for _ in range(n)]
    async with aclosing(merge([source.stream() for source in sources])) as merged:
        assert await anext(merged) == 1
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_the_reader_closes_all(n: int) -> None:
    sources = [Source(1, held=True) for _ in range(n)]

    async def read() -> None:
        async with aclosing(merge([source.stream() for source in sources])) as merged:
            async for _ in merged:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert all(source.closed for source in sources)
