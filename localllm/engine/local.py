"""An engine in the caller's own process, with the interface of `client.EngineClient`."""

from __future__ import annotations

import logging
import threading

from localllm.config import EngineConfig
from localllm.engine.client import Inbox
from localllm.engine.core import EngineCore
from localllm.engine.loader import load_engine
from localllm.engine.messages import EngineStats, Ready, SequenceNews, Submit
from localllm.errors import EngineError

logger = logging.getLogger("localllm.engine")


class LocalEngine:
    """Computes while a caller waits for news: whoever waits steps for all."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None  # None before `start` and after `close`
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self._core is None else self._core.stats

    def start(self) -> None:
        self._core = load_engine(self._config, lambda text: logger.info("%s", text))

    def wait_ready(self) -> Ready:
        return self._open_core().ready

    def submit(self, request: Submit, inbox: Inbox) -> None:
        with self._lock:
            core = self._open_core()
            core.admission.check(request)
            core.add(request)
            self._inboxes[request.sequence_id] = inbox

    def cancel(self, sequence_id: str) -> None:
        with self._lock:
            if self._core is not None:
                self._core.cancel(sequence_id)

    def next_news(self, inbox: Inbox) -> SequenceNews:
        while True:
            with self._lock:
                if not inbox.empty():
                    return inbox.get()
                self._step(self._open_core())

    def close(self) -> None:
        with self._lock:
            if self._core is not None:
                self._core.close()
                self._core = None

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise EngineError("The engine is closed")
        return self._core

    def _step(self, core: EngineCore) -> None:
        for news in core.step().news:
            self._inboxes[news.sequence_id].put(news)
            if news.finish_reason:
                del self._inboxes[news.sequence_id]
