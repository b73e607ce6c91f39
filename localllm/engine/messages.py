"""What crosses the line between the process that serves and the one that computes.

Client to engine: Submit, Cancel, Stop. Engine to client: Loading, Ready, StepResults, Fatal, Crash.
All are small, picklable and immutable; one StepResults per step carries every sequence's news.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from localllm.engine.meter import Tally
from localllm.errors import EngineError, RequestError
from localllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # the scheduler speaks these and needs no numpy
    from localllm.backends.program import FloatArray

_NOTHING = Tally()

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Submit:
    """One sequence to compute. A request with n choices is n of these, `choice` 0..n-1.

    Without `params.seed` the engine draws one at admission. `eos_ids` end the sequence unless
    `params.ignore_eos`. With `prompt_logits` the answer is the raw logits of every prompt
    position, and nothing is generated. Sequences share cached prefixes only within one
    `cache_salt`. A smaller `priority` goes first.
    """

    sequence_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: frozenset[int]
    choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    prompt_logits: bool = False


@dataclass(frozen=True)
class Cancel:
    sequence_id: str


@dataclass(frozen=True)
class Stop:
    """Ends the engine process at once; unfinished sequences are dropped."""


@dataclass(frozen=True)
class Loading:
    """A progress line for people."""

    text: str


@dataclass(frozen=True)
class Ready:
    """The engine is warmed up: the next token is as fast as any."""

    architecture: str
    backend: str
    device: str  # Backend.describe()
    threads: int
    context: int  # tokens that one request may use
    vocab_size: int
    kv_blocks: tuple[int, ...]  # per KV group
    kv_bytes: int
    load_seconds: float


class TokenLogprobs(NamedTuple):
    """How likely the model found a token, and which it found most likely: natural logarithms.

    `rank` 1 is the most likely token. `top` has as many (token, logprob) as were asked for, by
    falling probability; the token itself need not be among them.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SequenceNews:
    """What one step brought for one sequence.

    `finish_reason` set means that this is its last news and its memory is free already; `stop_id`
    is the token that ended it (an end-of-generation or stop id; it is part of `tokens`).
    `cached_tokens` is how much of the prompt the prefix cache served (known from first news on);
    `started` is when the sequence's first step began, by `time.monotonic`, which the processes of
    one machine share. The first news comes with the first step, tokens or not.
    """

    sequence_id: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    cached_tokens: int = 0
    started: float | None = None
    logits: FloatArray | None = None  # [chunk, vocab] rows in prompt order, for prompt_logits
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `tokens`, where the request asks
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens; none of the first
    error: str | None = None
    refused: bool = False  # the error is the request's own

    def failure(self) -> RequestError | EngineError:
        """What to raise for a sequence that ended with an error, or was dropped."""
        if self.refused and self.error:
            return RequestError(self.error)
        return EngineError(self.error or "The engine dropped the sequence")


@dataclass(frozen=True)
class EngineStats:
    """A snapshot after a step; sent at least once a second as the engine's heartbeat."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1, blocks held by live sequences
    preemptions: int = 0  # since start
    steps: int = 0
    prompt_tokens: int = 0  # computed, without cache hits
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens served
    alloc_failures: int = 0  # times that a running sequence found no block
    evictions: int = 0  # cached blocks that were taken for something else
    step_tokens: Tally = _NOTHING  # by meter.TOKEN_BOUNDS
    step_seconds: tuple[tuple[str, Tally], ...] = ()  # by phase, by meter.SECOND_BOUNDS


@dataclass(frozen=True)
class StepResults:
    news: tuple[SequenceNews, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True)
class Fatal:
    """The engine could not start. `kind` is the error's class name, for ModelError and friends."""

    kind: str
    message: str


@dataclass(frozen=True)
class Crash:
    """The last words of an engine that cannot go on; a new one may."""

    reason: str


ToEngine: TypeAlias = Submit | Cancel | Stop
FromEngine: TypeAlias = Loading | Ready | StepResults | Fatal | Crash
