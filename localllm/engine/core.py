"""The engine itself, in whatever process it lives: sequences in, a step's news out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from localllm.engine.admission import Admission
from localllm.engine.messages import EngineStats, Ready, StepResults, Submit
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduler


class EngineCore:
    """A loaded, warmed up model (see `loader.load_engine`). Used by one thread at a time."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, ready: Ready, close: Callable[[], None]
    ) -> None:
        self.ready = ready
        self.close = close
        self._scheduler = scheduler
        self._runner = runner

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def admission(self) -> Admission:
        return self._scheduler.admission

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def add(self, request: Submit) -> None:
        if request.params.seed is None:
            params = replace(request.params, seed=secrets.randbits(64))
            request = replace(request, params=params)
        self._scheduler.add(request)

    def cancel(self, sequence_id: str) -> None:
        """Frees the sequence's memory at once; unknown ids are fine."""
        self._scheduler.cancel(sequence_id)

    def step(self) -> StepResults:
        plan = self._scheduler.schedule()
        result = self._runner.run(plan)
        news = self._scheduler.update(result)
        return StepResults(tuple(news), self._scheduler.stats())

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and sequence is accounted for."""
        self._scheduler.check_integrity()
