"""What is served and how it is doing: models, health, and the page at /."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.responses import Response

from localllm.server.dependencies import ERRORS, ModelDep, ServiceDep
from localllm.server.errors import INVALID_REQUEST, Failure
from localllm.server.protocol.answers import ErrorEnvelope, Health, ModelCard, ModelList
from localllm.server.served_model import ServedModel
from localllm.server.service import Service

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
    return ModelList(data=[_card(service, model)])


@router.get("/models/{model_id:path}", responses=ERRORS, include_in_schema=False)
@router.get("/v1/models/{model_id:path}", responses={**ERRORS, 404: {"model": ErrorEnvelope}})
async def get_model(model_id: str, service: ServiceDep, model: ModelDep) -> Response:
    """One model, by the id that /v1/models tells."""
    if model_id != model.id:
        message = f"The model {model_id!r} does not exist; this server has {model.id!r}"
        failure = Failure(404, message, INVALID_REQUEST, "model", "model_not_found")
        return failure.response()
    return JSONResponse(_card(service, model).model_dump())


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


def _card(service: Service, model: ServedModel) -> ModelCard:
    context = service.context()
    return ModelCard(
        id=model.id,
        created=model.created,
        max_model_len=context,
        context_length=context,
        meta={**model.details, "n_ctx": context},
    )
