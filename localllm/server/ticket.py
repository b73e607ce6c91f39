"""One admitted request on its way through the engine: whose it is, how long it took so far, and
when its patience ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from localllm.engine.messages import SequenceNews, Submit
from localllm.errors import LocalLLMError
from localllm.server.auth import Tenant
from localllm.server.errors import TimeLimitError, UnavailableError
from localllm.server.metrics import ClassMetrics, Metrics
from localllm.server.ports import SequenceEngine

_RETRY_AFTER_QUEUE = 10


@dataclass(frozen=True)
class Patience:
    """Seconds; None is no limit."""

    queue: float | None = None
    answer: float | None = None


class Ticket:
    """The engine as one request sees it (a `SequenceEngine`): its sequences carry the tenant's
    salt and priority, are measured, and are given up when they wait or take too long.

    `close` must be called at the end.
    """

    def __init__(
        self, engine: SequenceEngine, tenant: Tenant, metrics: Metrics, patience: Patience
    ) -> None:
        self.tenant = tenant
        self.metrics = metrics
        self.structured = False  # whether the request itself asks for a grammar
        self.arrived = time.monotonic()
        self._engine = engine
        self._instruments = metrics.of_class(tenant.traffic_class)
        self._verdict: LocalLLMError | None = None
        self._watches: dict[str, _Watch] = {}
        self._timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        if patience.queue is not None:
            self._timers.append(loop.call_later(patience.queue, self._end_wait, patience.queue))
        if patience.answer is not None:
            self._timers.append(loop.call_later(patience.answer, self._end_all, patience.answer))

    def submit(self, request: Submit) -> AsyncIterator[SequenceNews]:
        if self._verdict is not None:
            raise self._verdict
        request = replace(
            request,
            cache_salt=f"{self.tenant.name}\n{request.cache_salt}",
            priority=self.tenant.priority + request.priority,
        )
        news = self._engine.submit(request)
        watch = _Watch(self, len(request.prompt), news, self._instruments)
        self._watches[request.sequence_id] = watch
        return watch

    def cancel(self, sequence_id: str) -> None:
        if watch := self._watches.get(sequence_id):
            watch.cancelled = watch.cancelled or time.monotonic()
        self._engine.cancel(sequence_id)

    @property
    def verdict(self) -> LocalLLMError | None:
        """Why the request was given up, once it was."""
        return self._verdict

    @property
    def started(self) -> bool:
        return any(watch.started is not None for watch in self._watches.values())

    def timings(self) -> dict[str, Any]:
        """llama.cpp's names. Several answers count as one that is as long as all of them."""
        return _timings(self._watches.values())

    def close(self, answered: bool) -> None:
        """`answered` tells whether the client got everything, as opposed to an error or less."""
        for timer in self._timers:
            timer.cancel()
        answered = answered and not any(watch.failed for watch in self._watches.values())
        for watch in self._watches.values():
            watch.close(answered)

    def _end_wait(self, seconds: float) -> None:
        if not self.started:
            error = UnavailableError(
                f"The request waited {seconds:g} s for its turn",
                code="queue_timeout",
                retry_after=_RETRY_AFTER_QUEUE,
            )
            self._give_up(error, "queue")

    def _end_all(self, seconds: float) -> None:
        message = f"The answer was not complete after {seconds:g} s"
        self._give_up(TimeLimitError(message), "answer")

    def _give_up(self, verdict: LocalLLMError, stage: str) -> None:
        self._verdict = self._verdict or verdict
        self.metrics.timeout(stage)
        for sequence_id, watch in self._watches.items():
            if watch.finished is None:
                self._engine.cancel(sequence_id)


class _Watch(AsyncIterator[SequenceNews]):
    """One sequence's news, with an eye on the clock."""

    def __init__(
        self,
        ticket: Ticket,
        n_prompt: int,
        news: AsyncIterator[SequenceNews],
        instruments: ClassMetrics,
    ) -> None:
        self.n_prompt = n_prompt
        self.n_generated = 0
        self.cached = 0
        self.started: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.finished: str | None = None
        self.cancelled: float | None = None
        self.failed = False
        self._ticket = ticket
        self._news = news
        self._instruments = instruments

    async def __anext__(self) -> SequenceNews:
        try:
            news = await anext(self._news)
        except StopAsyncIteration:
            raise
        except Exception:
            self.failed = True
            raise
        if news.finish_reason == "cancelled" and self._ticket.verdict is not None:
            self.failed = True
            raise self._ticket.verdict
        self._note(news)
        return news

    def _note(self, news: SequenceNews) -> None:
        now = time.monotonic()
        if self.started is None:
            self.started = now if news.started is None else news.started
            self.cached = news.cached_tokens
            self._instruments.queue_time(max(0.0, self.started - self._ticket.arrived))
        if count := len(news.tokens):
            self.n_generated += count
            self._instruments.count_generation_tokens(count)
            if self.last is None:
                self._note_first(now)
            else:
                self._instruments.inter_token_latency(now - self.last)
            self.last = now
        if news.finish_reason is not None:
            self._finish(news.finish_reason)

    def _note_first(self, now: float) -> None:
        assert self.started is not None
        self.first = now
        self._instruments.count_prompt_tokens(self.n_prompt)
        self._instruments.time_to_first_token(now - self._ticket.arrived)
        self._instruments.prefill_time(now - self.started)

    def close(self, answered: bool) -> None:
        """A sequence without an end was stopped by a stop string, or given up."""
        if self.finished is not None:
            return
        if self.failed:
            self._finish("error")
        elif answered and self.cancelled is not None:
            self._finish("stop")
        else:
            phase = "queue" if self.started is None else "decode" if self.first else "prefill"
            self._ticket.metrics.cancellation(phase)
            self._finish("abort")

    def _finish(self, reason: str) -> None:
        self.finished = reason
        instruments = self._instruments
        instruments.finished(reason)
        if self._ticket.structured and reason in ("stop", "length"):
            self._ticket.metrics.structured_output(valid=reason == "stop")
        if reason not in ("stop", "length"):
            return
        if self.first is None or self.last is None:  # asked for the prompt's logprobs alone
            instruments.count_prompt_tokens(self.n_prompt)
            return
        instruments.prompt_tokens(self.n_prompt)
        instruments.generation_tokens(self.n_generated)
        instruments.e2e_latency(self.last - self._ticket.arrived)
        instruments.decode_time(self.last - self.first)
        if self.n_generated > 1:
            instruments.time_per_output_token((self.last - self.first) / (self.n_generated - 1))


def _timings(watches: Iterable[_Watch]) -> dict[str, Any]:
    begun = [watch for watch in watches if watch.started is not None]
    firsts = [watch.first for watch in begun if watch.first is not None]
    prompt_n = sum(watch.n_prompt - watch.cached for watch in begun)
    cache_n = sum(watch.cached for watch in begun)
    predicted_n = sum(watch.n_generated for watch in begun)
    prompt_s = predicted_s = 0.0
    if firsts:
        prompt_s = min(firsts) - min(watch.started or 0.0 for watch in begun)
        predicted_s = max(watch.last or 0.0 for watch in begun) - min(firsts)
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        **_rate("prompt", prompt_n, prompt_s),
        "predicted_n": predicted_n,
        **_rate("predicted", predicted_n, predicted_s),
    }


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds > 0 else 0.0,
    }
