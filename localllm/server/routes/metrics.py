"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from localllm.server.metrics import Metrics

router = APIRouter(tags=["about"])


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """In Prometheus's text format."""
    collected: Metrics = request.app.state.metrics
    return Response(collected.text(), media_type=CONTENT_TYPE_LATEST)
