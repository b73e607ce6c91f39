"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from localllm.server.dependencies import ERRORS
from localllm.server.metrics import Metrics

router = APIRouter(tags=["about"])


@router.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
async def metrics(request: Request) -> Response:
    """In Prometheus's text format."""
    collected: Metrics = request.app.state.metrics
    return Response(collected.text(), media_type=CONTENT_TYPE_LATEST)
