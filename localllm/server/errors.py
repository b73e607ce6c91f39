"""How anything that goes wrong looks to an HTTP client: OpenAI's error envelope."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from localllm.errors import EngineError, LocalLLMError, RequestError
from localllm.server.validation import describe_validation_error

logger = logging.getLogger("localllm.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class UnavailableError(LocalLLMError):
    """The server cannot answer now and says when to come back: HTTP 503."""

    def __init__(self, message: str, *, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


@dataclass(frozen=True)
class Failure:
    """An error as the client gets it, by status line or in mid-stream."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.envelope(), self.status, self.headers)


def failure_of(error: Exception) -> Failure:
    """The failure that stands for `error`; one that nobody foresaw tells nothing of itself."""
    match error:
        case RequestError():
            return Failure(400, str(error), INVALID_REQUEST, error.param, error.code)
        case RequestValidationError():
            return _validation_failure(error)
        case UnavailableError():
            wait = {"retry-after": str(error.retry_after)}
            return Failure(503, str(error), SERVER_ERROR, code=error.code, headers=wait)
        case EngineError():
            # Clients retry a 500 on their own, and this request may be what the engine died of.
            once = {"x-should-retry": "false"}
            return Failure(500, str(error), SERVER_ERROR, code="engine_error", headers=once)
        case HTTPException():
            headers = error.headers or {}
            return Failure(error.status_code, error.detail, INVALID_REQUEST, headers=headers)
        case _:
            message = "Internal error; the server's log says more under this request's id"
            return Failure(500, message, SERVER_ERROR, code="internal_error")


def _validation_failure(error: RequestValidationError) -> Failure:
    param, message = describe_validation_error(error.errors())
    if isinstance(error.body, bytes):  # FastAPI did not take it for JSON
        return Failure(415, "Send the header Content-Type: application/json", INVALID_REQUEST)
    return Failure(400, message, INVALID_REQUEST, param)


def add_error_handlers(app: FastAPI) -> None:
    """Errors that nobody foresaw are left to the outermost middleware, which logs them."""
    for kind in (RequestError, RequestValidationError, UnavailableError, EngineError):
        app.add_exception_handler(kind, _respond)
    app.add_exception_handler(HTTPException, _respond_to_http_error)
    app.add_exception_handler(ClientGoneError, _note_client_gone)


async def _respond(_request: Request, error: Exception) -> JSONResponse:
    return failure_of(error).response()


async def _respond_to_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404 and error.detail == "Not Found":
        message = f"Unknown request URL: {where}"
        return Failure(404, message, INVALID_REQUEST, code="unknown_url").response()
    if error.status_code == 405:
        message = f"Method not allowed: {where}"
        headers = error.headers or {}
        failure = Failure(405, message, INVALID_REQUEST, code="method_not_allowed", headers=headers)
        return failure.response()
    return failure_of(error).response()


async def _note_client_gone(_request: Request, _error: Exception) -> JSONResponse:
    return Failure(499, "The client closed the connection", INVALID_REQUEST).response()
