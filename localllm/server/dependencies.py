"""What routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from localllm.server.protocol.answers import ErrorEnvelope
from localllm.server.served_model import ServedModel
from localllm.server.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _model(service: Annotated[Service, Depends(_service)]) -> ServedModel:
    return service.model()


ServiceDep = Annotated[Service, Depends(_service)]
ModelDep = Annotated[ServedModel, Depends(_model)]
"""The model, ready to take a request; 503 otherwise."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope} for status in (400, 413, 415, 500, 503)
}
