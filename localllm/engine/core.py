"""The engine itself, in whatever process it lives: sequences in, a step's news out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from localllm.engine.admission import Admission
from localllm.engine.messages import EngineStats, Ready, SequenceNews, StepResults, Submit
from localllm.engine.meter import StepMeter
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Plan


class EngineCore:
    """A loaded, warmed up model (see `loader.load_engine`). Used by one thread at a time."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, ready: Ready, close: Callable[[], None]
    ) -> None:
        self.ready = ready
        self.close = close
        self._scheduler = scheduler
        self._runner = runner
        self._meter = StepMeter()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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
        self._scheduler.add(request)

    def cancel(self, sequence_id: str) -> None:
        """Frees the sequence's memory at once; unknown ids are fine."""
        self._scheduler.cancel(sequence_id)

    def step(self) -> StepResults:
        began = time.monotonic()
        plan = self._scheduler.schedule()
        starts = _mark_starts(plan, began)
        scheduled = time.monotonic()
        result = self._runner.run(plan)
        ran = time.monotonic()
        news = self._scheduler.update(result)
        if plan.chunks:
            tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
            times = (began, scheduled, ran, time.monotonic())
            self._meter.add(tokens, *(b - a for a, b in pairwise(times)))
        return StepResults((*starts, *news), self.stats)

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
