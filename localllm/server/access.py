"""Who may talk to the server, and from where. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.auth import ANYBODY, KeyRing
from localllm.server.errors import INVALID_REQUEST, Failure, refuse

_OPEN_PATHS = frozenset({"/", "/health"})  # the page holds no secret, and asks for the key
_EXPOSED = "x-request-id, x-localllm-ignored, retry-after, retry-after-ms, x-should-retry"
_METHODS = "GET, HEAD, POST, OPTIONS"
_PREFLIGHT_SECONDS = "600"


class HostCheck:
    """Refuses names that are not this machine's, so that no page of the web can reach a server
    on localhost by giving its own name this address (DNS rebinding)."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not self._is_allowed(host):
                failure = Failure(
                    403,
                    "The Host header does not name this machine; --allowed-host lets a name in",
                    INVALID_REQUEST,
                    code="host_not_allowed",
                )
                await refuse(failure, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = _host_name(f"//{host}")
        return name is not None and (is_local_name(name) or name in self._allowed)


class Cors:
    """Tells browsers which pages of other origins may read answers: those of this machine, and
    those that the operator named."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if scope["type"] != "http" or origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(origin, scope, receive, send)
        else:
            await self._app(scope, receive, self._marking(origin, send))

    def _is_allowed(self, origin: str) -> bool:
        if self._any or origin.lower() in self._origins:
            return True
        parts = origin.lower().startswith(("http://", "https://")) and _host_name(origin)
        return bool(parts) and is_local_name(str(parts))

    def _marking(self, origin: str, send: Send) -> Send:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Origin")
                if self._is_allowed(origin):
                    headers["access-control-allow-origin"] = origin
                    headers["access-control-expose-headers"] = _EXPOSED
            await send(message)

        return send_marked

    async def _preflight(self, origin: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_allowed(origin):
            failure = Failure(
                403,
                "Pages of this origin may not ask; --cors-origin lets them",
                INVALID_REQUEST,
                code="origin_not_allowed",
                headers={"vary": "Origin"},
            )
            await refuse(failure, scope, receive, send)
            return
        asked = Headers(scope=scope)
        headers = {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked.get("access-control-request-headers", "*"),
            "access-control-max-age": _PREFLIGHT_SECONDS,
            "vary": "Origin, Access-Control-Request-Headers",
        }
        if asked.get("access-control-request-private-network") == "true":
            headers["access-control-allow-private-network"] = "true"
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 204, "headers": raw})
        await send({"type": "http.response.body", "body": b""})


class Authentication:
    """Finds the tenant of each request, or answers 401 where keys are needed."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = ANYBODY
        if self._keys and scope["path"] not in _OPEN_PATHS:
            key = _presented_key(Headers(scope=scope))
            found = None if key is None else self._keys.find(key)
            if found is None:
                await refuse(_unauthorized(key is None), scope, receive, send)
                return
            tenant = found
        scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)


def _presented_key(headers: Headers) -> bytes | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1") or None


def _unauthorized(missing: bool) -> Failure:
    need = "This server wants an API key, as Authorization: Bearer KEY or as x-api-key: KEY"
    return Failure(
        401,
        need if missing else "This API key is not known here",
        INVALID_REQUEST,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def is_local_name(name: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_name(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError when it is no number
    except ValueError:
        return None
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return parts.hostname
