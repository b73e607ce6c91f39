"""How anything that goes wrong looks to an HTTP client: OpenAI's error envelope."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from localllm.errors import EngineError, LocalLLMError, RequestError
from localllm.server.validation import describe_validation_error

logger = logging.getLogger("localllm.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class UnavailableError(LocalLLMError):
    """The server cannot answer now and says, in seconds, when to come back: HTTP 503."""

    status: ClassVar = 503
    type: ClassVar = SERVER_ERROR

    def __init__(self, message: str, *, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class TooManyRequestsError(UnavailableError):
    """There are too many requests, or too many of this client: HTTP 429."""

    status: ClassVar = 429
    type: ClassVar = "rate_limit_error"


class TimeLimitError(LocalLLMError):
    """The answer took longer than a request may: HTTP 504."""


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


class FailureError(HTTPException):
    """A failure that is known as such. (FastAPI lets an HTTPException pass while it reads a body,
    and takes anything else for a body that is no JSON.)"""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.status, failure.message, failure.headers)
        self.failure = failure


def failure_of(error: Exception) -> Failure:
    """The failure that stands for `error`; one that nobody foresaw tells nothing of itself."""
    match error:
        case RequestError():
            return Failure(400, str(error), INVALID_REQUEST, error.param, error.code)
        case RequestValidationError():
            return _validation_failure(error)
        case UnavailableError():
            wait = {"retry-after": str(error.retry_after)}
            return Failure(error.status, str(error), error.type, code=error.code, headers=wait)
        case TimeLimitError():
            once = {"x-should-retry": "false"}  # it would take as long again
            return Failure(504, str(error), SERVER_ERROR, code="request_timeout", headers=once)
        case EngineError():
            # Clients retry a 500 on their own, and this request may be what the engine died of.
            once = {"x-should-retry": "false"}
            return Failure(500, str(error), SERVER_ERROR, code="engine_error", headers=once)
        case FailureError():
            return error.failure
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
    for kind in (
        RequestError,
        RequestValidationError,
        UnavailableError,
        TimeLimitError,
        EngineError,
    ):
        app.add_exception_handler(kind, _respond)
    app.add_exception_handler(HTTPException, _respond_to_http_error)
    app.add_exception_handler(ClientGoneError, _note_client_gone)


async def refuse(failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with a failure, and leaves it where the log and the metrics look for it."""
    scope["state"]["failure"] = failure
    await failure.response()(scope, receive, send)


def _respond_with(failure: Failure, request: Request) -> JSONResponse:
    request.state.failure = failure
    return failure.response()


async def _respond(request: Request, error: Exception) -> JSONResponse:
    return _respond_with(failure_of(error), request)


async def _respond_to_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    failure = failure_of(error)
    if error.status_code == 404 and error.detail == "Not Found":
        message = f"Unknown request URL: {where}"
        failure = replace(failure, message=message, code="unknown_url")
    if error.status_code == 405:
        message = f"Method not allowed: {where}"
        failure = replace(failure, message=message, code="method_not_allowed")
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's, for any bad body
        failure = replace(failure, message=_unreadable(error.__cause__))
    return _respond_with(failure, request)


def _unreadable(cause: BaseException) -> str:
    """What is wrong with a body that Python's JSON reader gave up on."""
    match cause:
        case RecursionError():
            return "The request body is nested too deeply"
        case UnicodeDecodeError():
            return "The request body is not valid UTF-8"
        case ValueError():
            return "The request body has a number with too many digits"
    return "The request body could not be read"


async def _note_client_gone(request: Request, _error: Exception) -> JSONResponse:
    gone = Failure(499, "The client closed the connection", INVALID_REQUEST, code="client_gone")
    return _respond_with(gone, request)
