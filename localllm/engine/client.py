"""The engine process as callers see it: from threads, and from an event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias

from localllm.config import EngineConfig
from localllm.engine.messages import EngineStats, Ready, SequenceNews, Submit
from localllm.engine.supervisor import DEFAULT_HANG_SECONDS, Supervisor

Inbox: TypeAlias = "SimpleQueue[SequenceNews]"


class EngineClient:
    """For callers that block; any thread may call.

    The process ends with `close`, when the client is collected, or with the interpreter.
    """

    def __init__(self, config: EngineConfig, hang_seconds: float = DEFAULT_HANG_SECONDS) -> None:
        self._router = _Router()
        self._supervisor = Supervisor(config, self._router.deliver, hang_seconds)
        self._finalizer = weakref.finalize(self, self._supervisor.close)

    @property
    def stats(self) -> EngineStats:
        return self._supervisor.stats

    def start(self) -> None:
        """Begins to load the model."""
        self._supervisor.start()

    def wait_ready(self) -> Ready:
        """Blocks until the engine is warmed up; ModelError when it cannot be."""
        return self._supervisor.first_ready.result()

    def submit(self, request: Submit, inbox: Inbox) -> None:
        """News of the sequence come to `inbox`, the last with a finish reason.

        RequestError if the model cannot serve it, EngineError if there is no engine now.
        """
        self._router.add(request.sequence_id, inbox)
        try:
            self._supervisor.submit(request)
        except BaseException:
            self._router.remove(request.sequence_id)
            raise

    def cancel(self, sequence_id: str) -> None:
        """Takes effect within one step; ids that are unknown or finished are fine."""
        self._supervisor.cancel(sequence_id)

    def next_news(self, inbox: Inbox) -> SequenceNews:
        """Blocks until one of the inbox's unfinished sequences has news."""
        return inbox.get()

    def close(self) -> None:
        self._finalizer()


class _Router:
    """No part of the client, so that the supervisor's thread does not keep that alive."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def add(self, sequence_id: str, inbox: Inbox) -> None:
        if self._inboxes.setdefault(sequence_id, inbox) is not inbox:
            raise ValueError(f"sequence {sequence_id!r} is open already")

    def remove(self, sequence_id: str) -> None:
        del self._inboxes[sequence_id]

    def deliver(self, news: tuple[SequenceNews, ...]) -> None:
        for one in news:
            self._inboxes[one.sequence_id].put(one)
            if one.finish_reason:
                self.remove(one.sequence_id)


class AsyncEngineClient:
    """For one event loop, the one in which `start` is called."""

    def __init__(self, config: EngineConfig, hang_seconds: float = DEFAULT_HANG_SECONDS) -> None:
        self._supervisor = Supervisor(config, self._deliver, hang_seconds)
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was last warmed up; None before the first time."""
        return self._supervisor.ready

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot, as old as `heartbeat_age`."""
        return self._supervisor.stats

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine was last heard of; while a step runs it is silent."""
        return self._supervisor.heartbeat_age

    @property
    def healthy(self) -> bool:
        """Warmed up, alive, and its heart beats: a request submitted now will be worked on."""
        return self._supervisor.healthy

    @property
    def failed(self) -> str | None:
        """Why there is no engine and will not be one again; None while there may be."""
        return self._supervisor.failed

    @property
    def restarts(self) -> int:
        """Engines that became ready after the first one."""
        return self._supervisor.restarts

    async def start(self) -> Ready:
        """Returns when the engine is warmed up; ModelError when it cannot be."""
        self._loop = asyncio.get_running_loop()
        self._supervisor.start()
        ready = asyncio.wrap_future(self._supervisor.first_ready)
        ready.add_done_callback(_look_at)  # by then, who started it may have given up
        return await asyncio.shield(ready)

    def submit(self, request: Submit) -> AsyncIterator[SequenceNews]:
        """News up to the one with a finish reason; the iterator raises EngineError on an error.

        RequestError if the model cannot serve it, EngineError if there is no engine now. A caller
        who stops iterating before the end has to cancel the sequence.
        """
        self._supervisor.submit(request)
        stream = self._streams[request.sequence_id] = _Stream()
        return stream

    def cancel(self, sequence_id: str) -> None:
        """Takes effect within one step; ids that are unknown or finished are fine."""
        self._supervisor.cancel(sequence_id)

    async def close(self) -> None:
        """Ends the process; open iterators raise EngineError."""
        await asyncio.to_thread(self._finalizer)

    def _deliver(self, news: tuple[SequenceNews, ...]) -> None:
        """In the supervisor's thread: one wake-up of the loop for all news of a step."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop was closed without closing the client
            self._loop.call_soon_threadsafe(self._dispatch, news)

    def _dispatch(self, news: tuple[SequenceNews, ...]) -> None:
        for one in news:
            self._streams[one.sequence_id].put(one)
            if one.finish_reason:
                del self._streams[one.sequence_id]


def _look_at(ready: asyncio.Future[Ready]) -> None:
    """Keeps asyncio from reporting an error that nobody awaits any more."""
    if not ready.cancelled():
        ready.exception()


class _Stream(AsyncIterator[SequenceNews]):
    def __init__(self) -> None:
        self._news: asyncio.Queue[SequenceNews] = asyncio.Queue()
        self._ended = False

    def put(self, news: SequenceNews) -> None:
        self._news.put_nowait(news)

    async def __anext__(self) -> SequenceNews:
        if self._ended:
            raise StopAsyncIteration
        news = await self._news.get()
        self._ended = news.finish_reason is not None
        if news.finish_reason == "error":
            raise news.failure()
        return news
