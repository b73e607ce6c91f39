"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI

from localllm.config import HttpConfig
from localllm.server.access import Authentication, Cors, HostCheck, is_local_name
from localllm.server.admitted import Admission
from localllm.server.auth import KeyRing
from localllm.server.errors import add_error_handlers
from localllm.server.gate import Gate
from localllm.server.metrics import Metrics
from localllm.server.middleware import BodyLimit, RequestScope
from localllm.server.openapi import describe_truly
from localllm.server.routes import about, generate, metrics, tokens
from localllm.server.service import VERSION, Service
from localllm.server.ticket import Patience

MAX_RUNNING = 16


def create_app(
    service: Service,
    config: HttpConfig | None = None,
    keys: KeyRing | None = None,
    max_running: int = MAX_RUNNING,
) -> FastAPI:
    """Routes over `service`, which the caller loads and closes. `max_running` is the most
    sequences that its engine computes at a time."""
    config = config or HttpConfig()
    app = FastAPI(
        title="localllm",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # clients do not follow with a POST: unknown URLs are 404
    )
    app.state.service = service
    app.state.max_running = max_running
    app.state.metrics = Metrics(service, max_running)
    app.state.admission = Admission(
        service,
        Gate(max_running + config.max_queue),
        app.state.metrics,
        Patience(config.queue_timeout, config.request_timeout),
    )
    for routes in (generate, tokens, about, metrics):
        app.include_router(routes.router)
    add_error_handlers(app)
    describe_truly(app, with_keys=bool(keys))
    app.add_middleware(BodyLimit, max_bytes=config.max_body_size)
    app.add_middleware(Authentication, keys=keys or KeyRing())
    app.add_middleware(Cors, origins=config.cors_origins)
    if is_local_name(config.host) and "*" not in config.allowed_hosts:
        app.add_middleware(HostCheck, allowed=config.allowed_hosts)
    app.add_middleware(RequestScope, service=service, metrics=app.state.metrics)  # outermost
    return app
