"""What happens to every request, whatever its path. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.errors import INVALID_REQUEST, Failure, FailureError, failure_of, refuse
from localllm.server.metrics import Metrics
from localllm.server.service import Service

logger = logging.getLogger("localllm.server")

BODY_SECONDS = 60.0

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/metrics"})  # asked every few seconds by those who watch


class RequestScope:
    """Names, counts and logs each request, and answers for errors that nobody foresaw.

    The id is the client's `x-request-id` where that is a plain word, else a new one.
    """

    def __init__(self, app: ASGIApp, service: Service, metrics: Metrics) -> None:
        self._app = app
        self._service = service
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._service.open_request()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("%s failed", request_id)
            if not status:
                await refuse(failure_of(error), scope, receive, send_with_id)
        finally:
            self._service.close_request()
            if failure := scope["state"].get("failure"):
                self._metrics.rejection(failure.code or failure.type, failure.status)
            _log(scope, request_id, status, time.perf_counter() - began)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(8)}"


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
    usage = scope["state"].get("usage")
    tokens = f", {usage.prompt_tokens} + {usage.completion_tokens} tokens" if usage else ""
    path = scope["path"].encode("unicode_escape").decode()
    logger.log(
        level,
        "%s %s %s: %s in %.2f s%s",
        request_id,
        scope["method"],
        path,
        status,
        seconds,
        tokens,
    )


class BodyLimit:
    """Answers 413 to a body that is too long, unread where its length is announced, and 408 to one
    that does not come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await refuse(self._too_long(), scope, receive, send)
        else:
            await self._app(scope, _Body(receive, self._max_bytes, self._too_long()).receive, send)

    def _too_long(self) -> Failure:
        return Failure(
            413,
            f"The request body is longer than {self._max_bytes} bytes",
            INVALID_REQUEST,
            code="request_too_large",
            headers={"connection": "close"},
        )


class _Body:
    """Counts what comes, and how long it takes until all has come."""

    def __init__(self, receive: Receive, max_bytes: int, too_long: Failure) -> None:
        self._receive = receive
        self._left = max_bytes
        self._too_long = too_long
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise FailureError(_too_slow()) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise FailureError(self._too_long)
        self._complete = not message.get("more_body", False)
        return message


def _too_slow() -> Failure:
    return Failure(
        408,
        f"The request body did not come within {BODY_SECONDS:g} s",
        INVALID_REQUEST,
        code="body_timeout",
        headers={"connection": "close", "x-should-retry": "false"},
    )
