"""What routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from localllm.server.lanes import Lane
from localllm.server.protocol.answers import ErrorEnvelope
from localllm.server.served_model import ServedModel
from localllm.server.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _model(service: Annotated[Service, Depends(_service)]) -> ServedModel:
    return service.model()


async def _lane(request: Request, service: Annotated[Service, Depends(_service)]) -> Lane:
    return service.lanes.of(len(await request.body()))  # which FastAPI has read by now


ServiceDep = Annotated[Service, Depends(_service)]
ModelDep = Annotated[ServedModel, Depends(_model)]
"""The model, ready to take a request; 503 otherwise."""
LaneDep = Annotated[Lane, Depends(_lane)]
"""Where the work on a request's text goes."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope, "description": text}
    for status, text in (
        (400, "The request is wrong; `param` names the field"),
        (401, "An API key is needed"),
        (403, "The Host header does not name this machine"),
        (408, "The body did not come in time"),
        (413, "The body is too long"),
        (415, "The body is not announced as JSON"),
        (500, "A fault of the server"),
        (503, "Not now: `Retry-After` says when"),
    )
}

GENERATION_ERRORS: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    429: {"model": ErrorEnvelope, "description": "Too many requests: `Retry-After` says when"},
    504: {"model": ErrorEnvelope, "description": "The answer took too long"},
}
"""Of endpoints with a body that the engine works on."""

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its chunks as server-sent events",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "properties": {"data": {"type": "string"}},
                    "required": ["data"],
                }
            }
        },
    }
}
