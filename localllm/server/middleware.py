"""What happens to every request, whatever its path. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.errors import INVALID_REQUEST, Failure, failure_of
from localllm.server.service import Service

logger = logging.getLogger("localllm.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = frozenset({"/health"})  # asked every few seconds by those who watch


class RequestScope:
    """Names, counts and logs each request, and answers for errors that nobody foresaw.

    The id is the client's `x-request-id` where that is a plain word, else a new one.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

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
                await failure_of(error).response()(scope, receive, send_with_id)
        finally:
            self._service.close_request()
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
    """Answers 413 to a body that is too long: unread where its length is announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            failure = Failure(
                413,
                self._message(),
                INVALID_REQUEST,
                code="request_too_large",
                headers={"connection": "close"},
            )
            await failure.response()(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise HTTPException(413, self._message(), {"connection": "close"})
            return message

        await self._app(scope, receive_counted, send)

    def _message(self) -> str:
        return f"The request body is longer than {self._max_bytes} bytes"
