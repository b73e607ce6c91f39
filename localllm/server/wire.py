"""Uvicorn's HTTP/1.1, with the failures that no application sees in our envelope."""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.server.errors import INVALID_REQUEST, Failure

logger = logging.getLogger("localllm.server")

HEAD_SECONDS = 30.0  # for a request's first line and headers


class Wire(H11Protocol):
    """Closes connections that begin a request and do not go on, or send what is no HTTP."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """`msg` is Uvicorn's, and says nothing more."""
        self._refuse(Failure(400, msg, INVALID_REQUEST, code="invalid_http"))

    def _watch_head(self) -> None:
        """Times the next request's head from its first byte, whatever comes after that."""
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        message = f"The request's headers did not come within {HEAD_SECONDS:g} s"
        self._refuse(Failure(408, message, INVALID_REQUEST, code="head_timeout"))

    def _refuse(self, failure: Failure) -> None:
        request_id = f"req_{secrets.token_hex(8)}"
        logger.info("%s: %d: %s", request_id, failure.status, failure.message)
        answer = failure.response()
        more = [(b"x-request-id", request_id.encode()), (b"connection", b"close")]
        reason = HTTPStatus(failure.status).phrase.encode()
        events = (
            h11.Response(
                status_code=failure.status, headers=[*answer.raw_headers, *more], reason=reason
            ),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        try:
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer has begun already
        self.transport.close()
