"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI

from localllm.server.errors import add_error_handlers
from localllm.server.middleware import BodyLimit, RequestScope
from localllm.server.routes import about, generate, tokens
from localllm.server.service import VERSION, Service

MAX_BODY_BYTES = 16 * 2**20


def create_app(service: Service, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Routes over `service`, which the caller loads and closes."""
    app = FastAPI(title="localllm", version=VERSION, docs_url=None, redoc_url=None)
    app.state.service = service
    for routes in (generate, tokens, about):
        app.include_router(routes.router)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RequestScope, service=service)  # outermost
    return app
