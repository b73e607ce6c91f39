"""The engine itself, in whatever process it lives: sequences in, a step's news out."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from localllm.engine.admission import Admission
from localllm.engine.messages import EngineStats, Ready, SequenceNews, StepResults, Submit
from localllm.engine.meter import StepMeter
from localllm.engine.preparation import Preparation, needs_aids
from localllm.engine.runner import Runner, Sampled
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Plan, StepResult
from localllm.engine.vocabulary import Vocabulary
from localllm.errors import DeviceOutOfMemoryError, RequestError

_PATIENCE_SECONDS = 0.1  # after which the caller may look for other messages

_log = logging.getLogger(__name__)


class EngineCore:
    """A loaded, warmed up model (see `loader.load_engine`). Used by one thread at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ready: Ready,
        vocabulary: Vocabulary,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.ready = ready
        self._close = close
        self._preparation = Preparation(vocabulary)
        self._scheduler = scheduler
        self._runner = runner
        self._meter = StepMeter()
        self._ahead: Plan | None = None  # submitted, not collected
        self._cancelled: list[str] = []  # until that has been collected

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._preparation)

    @property
    def admission(self) -> Admission:
        return self._scheduler.admission

    @property
    def stats(self) -> EngineStats:
        meter = self._meter
        return replace(
            self._scheduler.stats(), step_tokens=meter.tokens, step_seconds=meter.seconds
        )

    def add(self, request: Submit) -> None:
        if request.params.seed is None:
            params = replace(request.params, seed=secrets.randbits(64))
            request = replace(request, params=params)
        if request.sequence_id in self._preparation:
            raise ValueError(f"sequence {request.sequence_id!r} exists already")
        if needs_aids(request.params) and not request.prompt_logits:
            self._preparation.start(request)
        else:
            self._scheduler.add(request)

    def cancel(self, sequence_id: str) -> None:
        """Frees the sequence's memory, after the step that the device has begun, if it has; unknown
        ids are fine."""
        if self._preparation.cancel(sequence_id):
            self._scheduler.tell(SequenceNews(sequence_id, finish_reason="cancelled"))
        elif self._ahead is not None:
            self._cancelled.append(sequence_id)
        else:
            self._scheduler.cancel(sequence_id)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            with suppress(DeviceOutOfMemoryError):
                self._runner.collect()
        self._preparation.close()
        self._close()

    def step(self, interrupted: Callable[[], bool] = lambda: False) -> StepResults:
        """One step's news. Where what follows is plain, the device has begun it on return, unless
        `interrupted` then says that the caller has something that should come first."""
        if self._preparation:
            self._add_prepared()
        began = time.monotonic()
        ahead, self._ahead = self._ahead, None
        plan = ahead or self._scheduler.schedule()
        starts = _mark_starts(plan, began)
        scheduled = time.monotonic()
        result = self._run(plan, ahead is not None, interrupted)
        plan = result.plan
        ran = time.monotonic()
        news = self._scheduler.update(result)
        if self._ahead is None:
            self._cancel_deferred()
        if plan.chunks:
            tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
            times = (began, scheduled, ran, time.monotonic())
            self._meter.add(tokens, *(b - a for a, b in pairwise(times)))
        return StepResults((*starts, *news), self.stats)

    def _run(self, plan: Plan, submitted: bool, interrupted: Callable[[], bool]) -> StepResult:
        """Of as many of the plan's sequences as the device has memory for."""
        while plan.chunks:
            try:
                if not submitted:
                    self._runner.submit(plan)
                following = None if self._cancelled else self._scheduler.foresee(plan)
                if following is not None:
                    self._runner.prepare(following)
                sampled = self._runner.collect()
            except DeviceOutOfMemoryError as error:
                reason = f"the device is out of memory: {error}"
            else:
                if following is not None and not interrupted():
                    self._go_ahead(plan, following, sampled)
                return self._runner.results(plan, sampled)
            _log.warning("a step of %d sequences failed: %s", len(plan.chunks), reason)
            plan, submitted = self._scheduler.shrink(plan, reason), False
        return StepResult(plan, ())

    def _go_ahead(self, plan: Plan, following: Plan, sampled: Sampled) -> None:
        """Begins the step that was foreseen, unless it came otherwise."""
        if self._scheduler.holds(plan, sampled.tokens.tolist()):
            # Without memory for it, it is planned anew, and then shrinks.
            with suppress(DeviceOutOfMemoryError):
                self._runner.submit_prepared(sampled)
                self._ahead = following

    def _cancel_deferred(self) -> None:
        for sequence_id in self._cancelled:
            self._scheduler.cancel(sequence_id)
        self._cancelled.clear()

    def _add_prepared(self) -> None:
        """Waits for them when there is nothing else to do."""
        patience = 0.0 if self._scheduler.has_work else _PATIENCE_SECONDS
        for request, outcome in self._preparation.ready(patience):
            if isinstance(outcome, Exception):
                news = SequenceNews(
                    request.sequence_id,
                    finish_reason="error",
                    error=str(outcome),
                    refused=isinstance(outcome, RequestError),
                )
                self._scheduler.tell(news)
            elif (sequence := self._scheduler.add(request)) is not None:
                sequence.aid(outcome.restriction, outcome.sampler)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and sequence is accounted for."""
        self._scheduler.check_integrity()


def _mark_starts(plan: Plan, now: float) -> list[SequenceNews]:
    """Dates sequences whose first step this is; news of those of which it brings no other."""
    starts = []
    for sequence, _, _, rows in plan.chunks:
        if sequence.started is None:
            sequence.started = now
            if not rows:
                cached = sequence.cached_tokens or 0
                starts.append(SequenceNews(sequence.id, cached_tokens=cached, started=now))
    return starts
