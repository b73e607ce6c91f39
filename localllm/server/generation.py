"""One request's way through the engine: token ids in, text of every choice out.

Knows nothing of HTTP or of any API's shapes, so that every dialect stands on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from localllm.engine.messages import SequenceNews, Submit
from localllm.errors import ContextLengthError, EngineError, RequestError
from localllm.sampling_params import SamplingParams
from localllm.server.merge import merge
from localllm.server.ports import SequenceEngine
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Delta:
    """What came for one choice. `finish_reason` is set in its last."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass
class TokenUsage:
    """Grows while the request runs. A prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Answer:
    """A choice as a whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True)
class Job:
    """A prompt with its parameters, `max_tokens` cut to what the context leaves."""

    prompt: tuple[int, ...]
    params: SamplingParams


def plan_job(prompt: Sequence[int], params: SamplingParams, context: int, param: str) -> Job:
    """RequestError (naming `param`) unless prompt and one token of output fit the context."""
    if not prompt:
        raise RequestError(f"{param} has no tokens", param=param)
    room = context - len(prompt)
    if room < 1:
        raise ContextLengthError(len(prompt), context, param=param)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return Job(tuple(prompt), replace(params, max_tokens=limit))


class Generation:
    """The choices of all jobs: choice c of job j has index j * n + c.

    To be consumed once, by `deltas` or by `answers`. Ending early (closing the generator,
    cancelling the task, any error) cancels in the engine whatever has not finished.
    """

    def __init__(
        self, engine: SequenceEngine, tokenizer: Tokenizer, id: str, jobs: Sequence[Job]
    ) -> None:
        self.id = id
        self.usage = TokenUsage(prompt_tokens=sum(len(job.prompt) for job in jobs))
        self._engine = engine
        self._tokenizer = tokenizer
        self._jobs = jobs

    @property
    def n_choices(self) -> int:
        return sum(job.params.n for job in self._jobs)

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """News of all choices as they come. EngineError when one of them fails."""
        sequences: list[AsyncGenerator[Delta, None]] = []
        for job in self._jobs:
            for choice in range(job.params.n):
                sequences.append(self._sequence(len(sequences), choice, job))
        return merge(sequences)

    async def answers(self) -> list[Answer]:
        """Waits for all choices: exactly what `deltas` brings, put together."""
        answers = [Answer() for _ in range(self.n_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                answer = answers[delta.index]
                answer.text += delta.text
                answer.tokens += delta.tokens
                if delta.finish_reason:
                    answer.finish_reason = delta.finish_reason
        return answers

    async def _sequence(self, index: int, choice: int, job: Job) -> AsyncGenerator[Delta, None]:
        sequence_id = f"{self.id}-{index}"
        reader = _SequenceReader(index, Detokenizer(self._tokenizer, stop=job.params.stop))
        submit = Submit(
            sequence_id=sequence_id,
            prompt=job.prompt,
            params=job.params,
            eos_ids=self._tokenizer.eog_ids,
            choice=choice,
        )
        told_cached = choice > 0
        in_engine = True
        try:
            async for news in self._engine.submit(submit):
                in_engine = news.finish_reason is None
                if not told_cached:
                    self.usage.cached_tokens += news.cached_tokens
                    told_cached = True
                delta = reader.read(news)
                self.usage.completion_tokens += len(delta.tokens)
                if delta.text or delta.tokens or delta.finish_reason:
                    yield delta
                if delta.finish_reason:
                    return
            in_engine = False
            raise EngineError("The engine ended a sequence without saying why")
        finally:
            if in_engine:
                self._engine.cancel(sequence_id)


class _SequenceReader:
    """Turns one sequence's news into deltas."""

    def __init__(self, index: int, detokenizer: Detokenizer) -> None:
        self._index = index
        self._detokenizer = detokenizer

    def read(self, news: SequenceNews) -> Delta:
        """Token by token, so that tokens after a stop string count for nothing."""
        if news.finish_reason in ("error", "cancelled"):
            raise EngineError(news.error or "The engine dropped the sequence")
        text = ""
        for position, token in enumerate(news.tokens):
            is_last = position == len(news.tokens) - 1
            if is_last and news.stop_id is not None:
                break  # it ends the text and is no part of it
            text += self._detokenizer.push([token])
            if self._detokenizer.stopped_by is not None:
                return Delta(self._index, text, news.tokens[: position + 1], "stop")
        if news.finish_reason is None:
            return Delta(self._index, text, news.tokens)
        text += self._detokenizer.finish()
        stopped = news.finish_reason == "stop" or self._detokenizer.stopped_by is not None
        reason: FinishReason = "stop" if stopped else "length"
        return Delta(self._index, text, news.tokens, reason)
