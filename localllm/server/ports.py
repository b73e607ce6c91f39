"""What the server needs from an engine; `engine.client.AsyncEngineClient` is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from localllm.engine.messages import EngineStats, Ready, SequenceNews, Submit


class SequenceEngine(Protocol):
    """What one request needs of an engine."""

    def submit(self, request: Submit) -> AsyncIterator[SequenceNews]:
        """The sequence's news up to the one with a finish reason; EngineError if it dies."""

    def cancel(self, sequence_id: str) -> None:
        """Frees the sequence's memory within one step; unknown and finished ids are fine."""


class EngineLike(SequenceEngine, Protocol):
    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was last warmed up; None before the first time."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""

    @property
    def healthy(self) -> bool:
        """Warmed up, alive, and its heart beats: a request submitted now will be worked on."""

    @property
    def failed(self) -> str | None:
        """Why there is no engine and will not be one again; None while there may be."""

    @property
    def restarts(self) -> int:
        """Engines started after the first."""

    async def start(self) -> Ready:
        """Returns when warmed up; ModelError when the model cannot be served."""

    async def close(self) -> None:
        """Ends the engine; iterators still open raise EngineError."""
