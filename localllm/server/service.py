"""The served model with its engine, and whether they can take a request now."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable
from typing import Literal

from localllm.server.errors import UnavailableError
from localllm.server.lanes import Lanes
from localllm.server.ports import EngineLike
from localllm.server.protocol.answers import Health
from localllm.server.served_model import ServedModel

VERSION = importlib.metadata.version("localllm")


class Service:
    """One per process. Every API dialect asks it for the model and gives its work to it."""

    def __init__(
        self, engine: EngineLike, load_model: Callable[[], ServedModel], config_hash: str = ""
    ) -> None:
        self.engine = engine
        self.open_requests = 0
        self.draining = False
        self._failed = False
        self._load_model = load_model
        self._config_hash = config_hash
        self._model: ServedModel | None = None
        self._started = time.monotonic()
        self.lanes = Lanes()
        self._request_closed = asyncio.Event()

    async def load(self) -> None:
        """Starts the engine and reads the model's text side meanwhile; ModelError if either
        cannot."""
        starting = asyncio.create_task(self.engine.start())
        try:
            model = await asyncio.to_thread(self._load_model)
            await starting
        except BaseException:
            self._failed = True
            await self.engine.close()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        self._model = model

    async def close(self) -> None:
        """Ends the engine; open requests end with an error."""
        self.lanes.close()
        await self.engine.close()

    def model(self) -> ServedModel:
        """The model, when a request can be worked on; else UnavailableError."""
        if self.draining:
            raise UnavailableError(self._detail(), code="draining", retry_after=5)
        if self._model is None:
            raise UnavailableError(self._detail(), code="loading", retry_after=2)
        if not self.engine.healthy:
            raise UnavailableError(self._detail(), code="engine_unavailable", retry_after=2)
        return self._model

    @property
    def loaded(self) -> bool:
        return self._model is not None

    @property
    def model_name(self) -> str:
        """The model's id; empty until it is loaded."""
        return "" if self._model is None else self._model.id

    @property
    def build_labels(self) -> dict[str, str]:
        """What tells one deployment from another, beside versions."""
        quant = "" if self._model is None else str(self._model.details.get("quantization", ""))
        return {"quant": quant, "config_hash": self._config_hash}

    def context(self) -> int:
        """Tokens that prompt and answer of one request may have in all."""
        assert self.engine.ready is not None
        return self.engine.ready.context

    def open_request(self) -> None:
        self.open_requests += 1

    def close_request(self) -> None:
        self.open_requests -= 1
        self._request_closed.set()

    async def idle(self) -> None:
        """Waits until no request is open."""
        while self.open_requests:
            self._request_closed.clear()
            await self._request_closed.wait()

    def health(self) -> Health:
        ready, stats = self.engine.ready, self.engine.stats
        health = Health(
            status=self._status(),
            detail=self._detail(),
            version=VERSION,
            uptime_seconds=round(time.monotonic() - self._started, 3),
            kv_usage=stats.kv_usage,
            running=stats.running,
            waiting=stats.waiting,
            preemptions=stats.preemptions,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
        )
        if self._model is not None:
            health.model = self._model.id
        if ready is not None:
            health.architecture = ready.architecture
            health.backend = ready.backend
            health.device = ready.device
            health.threads = ready.threads
            health.context_length = ready.context
            health.kv_cache_bytes = ready.kv_bytes
        return health

    def _status(self) -> Literal["ok", "loading", "draining", "unavailable", "failed"]:
        if self.draining:
            return "draining"
        if self._failed:
            return "failed"
        if self._model is None:
            return "loading"
        if self.engine.failed is not None:
            return "failed"
        return "ok" if self.engine.healthy else "unavailable"

    def _detail(self) -> str:
        if self._status() == "failed" and self._model is not None:
            return f"{self.engine.failed}. Restart the server"
        return _DETAILS[self._status()]


_DETAILS = {
    "ok": "Ready",
    "loading": "The model is still loading",
    "draining": "The server is finishing open requests and takes no new ones",
    "unavailable": "The engine does not answer or is being restarted",
    "failed": "The model could not be loaded; the server's log says why",
}
