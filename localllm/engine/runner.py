"""Runs a plan on the device."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.backends.base import Int32Array, Step, StepLimits
from localllm.engine.batch import BatchBuilder
from localllm.engine.sequence import NUMERICAL_ERROR, ChunkResult, Plan, StepResult


class Runner:
    def __init__(self, step: Step, limits: StepLimits, n_groups: int) -> None:
        self._step = step
        self._batches = BatchBuilder(limits, n_groups)

    def run(self, plan: Plan) -> StepResult:
        if not plan.chunks:
            return StepResult(plan, ())
        self._step.submit(self._batches.build(plan))
        tokens = self._step.collect()
        return StepResult(plan, tuple(self._chunk_results(plan, tokens)))

    def _chunk_results(self, plan: Plan, tokens: Int32Array) -> Iterator[ChunkResult]:
        row = 0
        for chunk in plan.chunks:
            sampled = tokens[row : row + chunk.rows].tolist()
            if not sampled:
                yield ChunkResult()
            elif NUMERICAL_ERROR in sampled:
                yield ChunkResult(NUMERICAL_ERROR)
            elif chunk.sequence.request.prompt_logits:
                logits = self._step.logits()[row : row + chunk.rows].copy()
                yield ChunkResult(sampled[-1], logits)
            else:
                yield ChunkResult(sampled[-1])
            row += chunk.rows
