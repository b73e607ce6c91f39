"""One request's way through the engine: token ids in, text of every choice out.

Knows nothing of HTTP or of any API's shapes, so that every dialect stands on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from localllm.engine.messages import SequenceNews, Submit, TokenLogprobs
from localllm.errors import ContextLengthError, EngineError, RequestError
from localllm.sampling_params import SamplingParams
from localllm.server.merge import merge
from localllm.server.output_format import OutputFormat
from localllm.server.ports import SequenceEngine
from localllm.server.shown_tokens import ShownToken, ShownTokens
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools.events import CallBegins, CallEnds, Event, ParsedAnswer, joined

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Delta:
    """What came for one choice. `finish_reason` is set in its last.

    `shown` are, where the request asks for logprobs, the tokens whose text begins in this delta's
    text or an earlier one's and that were not told before; `prompt_logprobs` those of the next
    prompt tokens. `events` are what the text means, where the job has an `output` format.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    shown: tuple[ShownToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass
class TokenUsage:
    """Grows while the request runs. A prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0  # of tools
    calls_cut: int = 0  # of these, without their end
    truncated_tokens: int = 0  # cut off from prompts on request; not part of `prompt_tokens`


@dataclass
class Answer:
    """A choice as a whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    shown: list[ShownToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    parsed: ParsedAnswer = field(default_factory=ParsedAnswer)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; needs a request for logprobs."""
        return sum(token.logprobs.logprob for token in self.shown) / max(1, len(self.shown))


@dataclass(frozen=True)
class Job:
    """A prompt with its parameters, `max_tokens` cut to what the context leaves."""

    prompt: tuple[int, ...]
    params: SamplingParams
    truncated: int = 0  # tokens cut off from the prompt's beginning
    output: OutputFormat | None = None


def plan_job(
    prompt: Sequence[int],
    params: SamplingParams,
    context: int,
    param: str,
    truncate: int | None = None,
    output: OutputFormat | None = None,
) -> Job:
    """RequestError (naming `param`) unless prompt and output of one token fit the context.

    `truncate` keeps the last so many tokens of the prompt; -1 keeps what leaves room for
    `max_tokens`.
    """
    if not prompt:
        raise RequestError(f"{param} has no tokens", param=param)
    least = 0 if params.max_tokens == 0 else 1
    kept = len(prompt)
    if truncate is not None:
        wanted = least if params.max_tokens is None else params.max_tokens
        kept = min(kept, truncate if truncate > 0 else max(1, context - wanted))
    room = context - kept
    if room < least:
        raise ContextLengthError(kept, context, param=param)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    cut = len(prompt) - kept
    return Job(tuple(prompt[cut:]), replace(params, max_tokens=limit), cut, output)


def best_answers(answers: Sequence[Answer], drawn: int, wanted: int) -> list[Answer]:
    """Of every `drawn` answers in a row the `wanted` ones with the highest mean logprob."""
    best: list[Answer] = []
    for first in range(0, len(answers), drawn):
        ranked = sorted(answers[first : first + drawn], key=lambda a: -a.mean_logprob)
        best += ranked[:wanted]
    return best


class Generation:
    """The choices of all jobs: choice c of job j has index j * n + c.

    To be consumed once, by `deltas` or by `answers`. Ending early (closing the generator,
    cancelling the task, any error) cancels in the engine whatever has not finished.
    """

    def __init__(
        self, engine: SequenceEngine, tokenizer: Tokenizer, id: str, jobs: Sequence[Job]
    ) -> None:
        self.id = id
        self.usage = TokenUsage(
            prompt_tokens=sum(len(job.prompt) for job in jobs),
            truncated_tokens=sum(job.truncated for job in jobs),
        )
        self.jobs = jobs
        self._engine = engine
        self._tokenizer = tokenizer

    @property
    def n_choices(self) -> int:
        return sum(job.params.n for job in self.jobs)

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """News of all choices as they come. EngineError when one of them fails."""
        sequences: list[AsyncGenerator[Delta, None]] = []
        for job in self.jobs:
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
                answer.shown += delta.shown
                answer.prompt_logprobs += delta.prompt_logprobs
                answer.parsed.add(delta.events)
                if delta.finish_reason:
                    answer.finish_reason = delta.finish_reason
        return answers

    async def _sequence(self, index: int, choice: int, job: Job) -> AsyncGenerator[Delta, None]:
        sequence_id = f"{self.id}-{index}"
        reader = _SequenceReader(index, self._tokenizer, job, self.usage)
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
                if delta.text or delta.tokens or delta.finish_reason or delta.prompt_logprobs:
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

    def __init__(self, index: int, tokenizer: Tokenizer, job: Job, usage: TokenUsage) -> None:
        self._index = index
        self._usage = usage
        params, output = job.params, job.output
        tokens = output.tokens(tokenizer) if output else tokenizer
        self._parser = output.parser() if output else None
        self._detokenizer = Detokenizer(
            tokens, params.stop, params.min_tokens, self._is_calling if self._parser else None
        )
        self._shown = None if params.logprobs is None else ShownTokens(tokens)
        self._events: list[Event] = []

    def read(self, news: SequenceNews) -> Delta:
        """Token by token, so that tokens after a stop string count for nothing."""
        if news.finish_reason in ("error", "cancelled"):
            raise news.failure()
        text = ""
        for position, token in enumerate(news.tokens):
            is_last = position == len(news.tokens) - 1
            is_end = is_last and news.stop_id is not None
            if self._shown is not None:
                self._shown.add(news.logprobs[position], is_end=is_end)
            if is_end:
                break  # it ends the text and is no part of it
            text += self._parsed(self._detokenizer.pieces([token]))
            if self._detokenizer.stopped_by is not None:
                return self._delta(news, text, news.tokens[: position + 1], "stop")
        if news.finish_reason is None:
            return self._delta(news, text, news.tokens, None)
        text += self._parsed([self._detokenizer.finish()], is_token=False)
        stopped = news.finish_reason == "stop" or self._detokenizer.stopped_by is not None
        return self._delta(news, text, news.tokens, "stop" if stopped else "length")

    def _delta(
        self,
        news: SequenceNews,
        text: str,
        tokens: tuple[int, ...],
        finish_reason: FinishReason | None,
    ) -> Delta:
        if self._parser is not None and finish_reason is not None:
            stopped = self._detokenizer.stopped_by is not None
            last = self._parser.finish(cut=stopped or finish_reason == "length")
            self._events += last
            if finish_reason == "length":
                self._usage.calls_cut += sum(isinstance(event, CallEnds) for event in last)
        events, self._events = tuple(joined(self._events)), []
        self._usage.calls += sum(isinstance(event, CallBegins) for event in events)
        shown: tuple[ShownToken, ...] = ()
        if self._shown is not None:
            cut = self._detokenizer.stopped_by is not None
            shown = self._shown.show(text, all_others=finish_reason is not None and not cut)
        return Delta(self._index, text, tokens, finish_reason, shown, news.prompt_logprobs, events)

    def _is_calling(self) -> bool:
        return self._parser is not None and self._parser.calling

    def _parsed(self, pieces: Iterable[str], *, is_token: bool = True) -> str:
        if self._parser is None:
            return "".join(pieces)
        thinking, text = self._parser.thinking, ""
        for piece in pieces:
            self._events += self._parser.push(piece)
            thinking |= self._parser.thinking
            text += piece
        self._usage.reasoning_tokens += is_token and thinking
        return text
