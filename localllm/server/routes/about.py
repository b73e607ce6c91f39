"""What is served and how it is doing: models, health, and the page at /."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from localllm.server.dependencies import ERRORS, ModelDep, ServiceDep
from localllm.server.errors import INVALID_REQUEST, Failure, FailureError
from localllm.server.protocol.answers import (
    ErrorEnvelope,
    Health,
    ModelCard,
    ModelDetails,
    ModelList,
)
from localllm.server.served_model import ServedModel
from localllm.server.service import VERSION, Service
from localllm.server.text import special_tokens

router = APIRouter(tags=["about"])

_PAGE = files("localllm.server").joinpath("static/index.html").read_text("utf-8")
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.head("/models", include_in_schema=False)
@router.head("/v1/models", include_in_schema=False)
@router.get("/models", responses=ERRORS, include_in_schema=False)
@router.get("/v1/models", responses=ERRORS)
async def list_models(service: ServiceDep, model: ModelDep) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[ModelCard(**_card(service, model))])


@router.head("/models/{model_id:path}", include_in_schema=False)
@router.head("/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}", responses={**ERRORS, 404: {"model": ErrorEnvelope}})
async def get_model(
    model_id: str, request: Request, service: ServiceDep, model: ModelDep
) -> ModelDetails:
    """One model, by the id that /v1/models tells, with all that is known of it."""
    if model_id != model.id:
        message = f"The model {model_id!r} does not exist; this server has {model.id!r}"
        raise FailureError(Failure(404, message, INVALID_REQUEST, "model", "model_not_found"))
    ready = service.engine.ready
    assert ready is not None
    return ModelDetails(
        **_card(service, model),
        **special_tokens(model.tokenizer),
        chat_template=model.template.source,
        architecture=ready.architecture,
        backend=ready.backend,
        device=ready.device,
        threads=ready.threads,
        kv_cache_bytes=ready.kv_bytes,
        max_num_seqs=request.app.state.max_running,
        modalities={"text": True, "vision": False, "audio": False},
        build=f"localllm {VERSION}",
    )


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={503: {"model": Health}})
async def health(service: ServiceDep, response: Response) -> Health:
    """200 when a request would be worked on now, else 503; the body says more either way."""
    report = service.health()
    if report.status != "ok":
        response.status_code = 503
        response.headers["retry-after"] = "2"
    return report


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


def _card(service: Service, model: ServedModel) -> dict[str, Any]:
    context = service.context()
    return {
        "id": model.id,
        "created": model.created,
        "max_model_len": context,
        "context_length": context,
        "quantization": model.details["quantization"],
        "capabilities": model.capabilities,
        "meta": {**model.details, "n_ctx": context},
    }
