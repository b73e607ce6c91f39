"""Runs a plan on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from localllm.backends.base import Batch, Int32Array, SamplingArrays, Step, StepLimits
from localllm.backends.program import FloatArray
from localllm.engine.batch import BatchBuilder
from localllm.engine.logprobs import token_logprobs
from localllm.engine.messages import TokenLogprobs
from localllm.engine.sequence import NUMERICAL_ERROR, Chunk, ChunkResult, Plan, StepResult

_NO_LOGITS: FloatArray = np.empty((0, 0), np.float32)


class Sampled(NamedTuple):
    """What a step drew: a token for each logit row, and how."""

    tokens: Int32Array
    sampling: SamplingArrays


class Runner:
    """One plan at a time: `submit`, `collect`, `results`. While the device computes, `prepare` may
    make the next batch, which `submit_prepared` sends before the results are looked at."""

    def __init__(self, step: Step, limits: StepLimits, n_groups: int, vocab: int) -> None:
        self._step = step
        self._builder = BatchBuilder(limits, n_groups, vocab)
        self._next_builder = BatchBuilder(limits, n_groups, vocab)
        self._batch: Batch | None = None
        self._next: Batch | None = None

    def submit(self, plan: Plan) -> None:
        self._batch = self._builder.build(plan)
        self._step.submit(self._batch)

    def prepare(self, plan: Plan) -> None:
        """For a plan that `Scheduler.foresee` made of the one submitted."""
        assert self._batch is not None
        self._next = self._next_builder.advance(self._batch, plan)

    def collect(self) -> Sampled:
        assert self._batch is not None
        self._builder.fill_masks()  # while the device computes
        return Sampled(self._step.collect(), self._batch.sampling)

    def submit_prepared(self, sampled: Sampled) -> None:
        """The tokens are those of the step before; its logits are gone."""
        assert self._next is not None
        self._next.ids[:] = sampled.tokens
        self._step.submit(self._next)
        self._batch, self._next = self._next, None
        self._builder, self._next_builder = self._next_builder, self._builder

    def results(self, plan: Plan, sampled: Sampled) -> StepResult:
        return StepResult(plan, tuple(self._chunk_results(plan, *sampled)))

    def _chunk_results(
        self, plan: Plan, tokens: Int32Array, sampling: SamplingArrays
    ) -> Iterator[ChunkResult]:
        row = 0
        for chunk in plan.chunks:
            sampled = tokens[row : row + chunk.rows].tolist()
            if not sampled:
                yield ChunkResult()
            elif NUMERICAL_ERROR in sampled:
                restriction = chunk.sequence.restriction
                error = restriction.error if restriction is not None else None
                yield ChunkResult(NUMERICAL_ERROR, error=error)
            elif chunk.sequence.is_plain:
                yield ChunkResult(sampled[-1])
            else:
                yield self._special_result(chunk, row, sampled[-1], sampling)
            row += chunk.rows

    def _special_result(
        self, chunk: Chunk, first: int, token: int, sampling: SamplingArrays
    ) -> ChunkResult:
        """For a sequence that wants more than a token of the device's sampler."""
        sequence = chunk.sequence
        top = sequence.request.params.logprobs
        needs_logits = top is not None or chunk.prompt_rows or sequence.sampler is not None
        if sequence.request.prompt_logits or needs_logits:
            logits = self._step.logits()[first : first + chunk.rows]
        else:  # a restriction alone, which the step has kept to
            logits = _NO_LOGITS
        if sequence.request.prompt_logits:
            return ChunkResult(logits=logits.copy())
        prompt_logprobs = tuple(_prompt_logprobs(chunk, logits))
        if not chunk.samples:
            return ChunkResult(prompt_logprobs=prompt_logprobs)
        if sequence.sampler is not None:
            token = sequence.sampler.draw(logits[-1], sampling, first + chunk.rows - 1, sequence)
        ended = False
        if (restriction := sequence.restriction) is not None and token != NUMERICAL_ERROR:
            restriction.take(token)
            if restriction.error is not None:
                return ChunkResult(NUMERICAL_ERROR, error=restriction.error)
            ended = restriction.ended
        told = top is not None and token != NUMERICAL_ERROR
        logprobs = (token_logprobs(logits[-1], token, top or 0),) if told else ()
        return ChunkResult(token, logprobs=logprobs, prompt_logprobs=prompt_logprobs, ended=ended)


def _prompt_logprobs(chunk: Chunk, logits: FloatArray) -> Iterator[TokenLogprobs]:
    """Row by row of the prompt's own, those of the token that follows in the prompt."""
    sequence = chunk.sequence
    prompt, top = sequence.request.prompt, sequence.request.params.prompt_logprobs
    for i in range(chunk.prompt_rows):
        follower = chunk.end - chunk.rows + i + 1
        if follower < len(prompt):
            yield token_logprobs(logits[i], prompt[follower], top or 0)
