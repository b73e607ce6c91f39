"""The server process: a port that opens at once, a model that loads, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from types import FrameType

import uvicorn

from localllm.config import HttpConfig
from localllm.errors import LocalLLMError
from localllm.server.app import MAX_RUNNING, create_app
from localllm.server.auth import KeyRing
from localllm.server.service import Service
from localllm.server.wire import Wire

logger = logging.getLogger("localllm.server")

_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, or both end them at once
_ABORT_SECONDS = 2  # for open connections to take their error, once the drain is over


async def serve(
    service: Service,
    listener: socket.socket,
    on_ready: Callable[[], None],
    http: HttpConfig | None = None,
    keys: KeyRing | None = None,
    max_running: int = MAX_RUNNING,
) -> None:
    """Serves until a signal ends it. The first SIGTERM or SIGINT lets open requests finish for
    `http.drain_seconds`; the second ends at once. An error in loading ends it and is raised."""
    http = http or HttpConfig()
    config = uvicorn.Config(
        create_app(service, http, keys, max_running),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        http=Wire,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_ABORT_SECONDS,
        ssl_certfile=http.ssl_certfile,
        ssl_keyfile=http.ssl_keyfile,
    )
    _load_tls(config)
    server = _Server(config, service, http.drain_seconds)
    serving = asyncio.create_task(server.serve([listener]))
    loading = asyncio.create_task(service.load())
    try:
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not service.draining:
            loading.result()
            on_ready()
        await asyncio.wait((serving,))  # unlike `await serving`, leaves it alone when cancelled
        serving.result()
    finally:
        server.should_exit = True
        loading.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        await service.close()
        listener.close()


def _load_tls(config: uvicorn.Config) -> None:
    """LocalLLMError when the certificate or its key cannot be used."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        reason = error.strerror or str(error)
        raise LocalLLMError(f"{files} are no certificate with its key: {reason}") from error


class _Server(uvicorn.Server):
    """Uvicorn, but draining with the port open, so that new requests are told instead of cut."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal handler. Uvicorn's own would raise the signal again after a clean end."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        if self._draining is None:
            logger.info("%s: finishing %d open requests", name, self._service.open_requests)
            self._service.draining = True
            self._draining = asyncio.create_task(self._drain())
        else:
            logger.info("%s again: ending at once", name)
            self._draining.cancel()
            self.force_exit = self.should_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._service.idle()
        except TimeoutError:
            logger.warning("%d requests cut off", self._service.open_requests)
        await self._service.close()
        self.should_exit = True
