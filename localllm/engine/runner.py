"""Runs a plan on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from localllm.backends.base import Int32Array, SamplingArrays, Step, StepLimits
from localllm.backends.program import FloatArray
from localllm.engine.batch import BatchBuilder
from localllm.engine.logprobs import token_logprobs
from localllm.engine.messages import TokenLogprobs
from localllm.engine.sequence import NUMERICAL_ERROR, Chunk, ChunkResult, Plan, StepResult

_NO_LOGITS: FloatArray = np.empty((0, 0), np.float32)


class Runner:
    def __init__(self, step: Step, limits: StepLimits, n_groups: int, vocab: int) -> None:
        self._step = step
        self._batches = BatchBuilder(limits, n_groups, vocab)

    def run(self, plan: Plan) -> StepResult:
        if not plan.chunks:
            return StepResult(plan, ())
        batch = self._batches.build(plan)
        self._step.submit(batch)
        self._batches.fill_masks()  # while the device computes
        tokens = self._step.collect()
        return StepResult(plan, tuple(self._chunk_results(plan, tokens, batch.sampling)))

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
