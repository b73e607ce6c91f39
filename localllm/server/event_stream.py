"""Server-sent events over ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.server.disconnect import unless_gone
from localllm.server.errors import ClientGoneError, Failure, failure_of

logger = logging.getLogger("localllm.server")

KEEPALIVE_SECONDS = 5.0
DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


def encode_event(data: Mapping[str, Any]) -> bytes:
    """ASCII only: some clients split lines at U+2028 too."""
    return b"data: %s\n\n" % json.dumps(data, separators=(",", ":")).encode()


class EventStream(Response):
    """Sends events as they come, comments while none comes, and stops when the client leaves.

    Until the first event (or comment) nothing has been sent, and an error is raised as from any
    other endpoint; later ones end the stream with an event that carries the error's envelope.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._started = False
        self._silent = True
        self._sending = asyncio.Lock()
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ping = asyncio.ensure_future(self._ping(send))
        try:
            await unless_gone(receive, self._pump(scope, send))
        except ClientGoneError:
            if not self._started:
                raise
            return
        finally:
            ping.cancel()
            await asyncio.gather(ping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, event)
        except Exception as error:
            if not self._started:
                raise
            failure = failure_of(error)
            _log_failure(scope, failure, error)
            await self._send(send, encode_event(failure.envelope()))

    async def _ping(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(KEEPALIVE_SECONDS)
            if self._silent:
                await self._send(send, _PING)

    async def _send(self, send: Send, event: bytes) -> None:
        self._silent = False
        async with self._sending:
            if not self._started:
                self._started = True
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": event, "more_body": True})


def _log_failure(scope: Scope, failure: Failure, error: Exception) -> None:
    request_id = scope.get("state", {}).get("request_id")
    trace = error if failure.code == "internal_error" else None
    logger.error("%s failed in mid-stream: %s", request_id, error, exc_info=trace)
