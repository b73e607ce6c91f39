"""One sequence as the scheduler sees it, and what a step does with it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.kv_manager import SequenceBlocks
from localllm.engine.messages import FinishReason, Submit, TokenLogprobs

if TYPE_CHECKING:
    from localllm.backends.program import FloatArray
    from localllm.engine.rare_sampling import RareSampler
    from localllm.engine.restrictions import Restriction

NUMERICAL_ERROR = -1  # what a backend samples from logits that are no numbers


class Sequence:
    """Known tokens, how many of them are computed, and the blocks that hold those."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "ends_with_prompt",
        "is_plain",
        "order",
        "prompt_rows",
        "request",
        "restriction",
        "rows_sent",
        "sampler",
        "started",
        "tokens",
    )

    def __init__(self, request: Submit, arrival: int, blocks: SequenceBlocks) -> None:
        self.request = request
        self.order = (request.priority, arrival)  # smaller goes first
        self.tokens = array("i", request.prompt)
        self.blocks = blocks
        self.computed = 0
        self.cached_tokens: int | None = None  # of the prompt, set at first admission
        self.started: float | None = None  # when its first step began, once the caller has told
        self.rows_sent = 0  # of `prompt_rows`
        self.restriction: Restriction | None = None
        self.sampler: RareSampler | None = None
        params, n_prompt = request.params, len(request.prompt)
        self.ends_with_prompt = request.prompt_logits or params.max_tokens == 0
        # Prompt positions whose logits are asked for, from the first on. The last one's are those
        # that the first token is sampled from, if there will be one.
        self.prompt_rows = 0
        if request.prompt_logits or params.prompt_logprobs is not None:
            self.prompt_rows = n_prompt if self.ends_with_prompt else n_prompt - 1
        # Whether nothing but the device's token is wanted.
        self.is_plain = self.prompt_rows == 0 and params.logprobs is None

    def aid(self, restriction: Restriction | None, sampler: RareSampler | None) -> None:
        """Gives it what its tokens are drawn with, before it is scheduled."""
        self.restriction, self.sampler = restriction, sampler
        self.is_plain = self.is_plain and restriction is None and sampler is None

    @property
    def id(self) -> str:
        return self.request.sequence_id

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def first_row(self) -> int:
        """The first position whose logits are still to come; the cache cannot serve it."""
        return self.rows_sent if self.owes_rows else len(self.tokens) - 1

    @property
    def owes_rows(self) -> bool:
        return self.rows_sent < self.prompt_rows

    def append(self, token: int, context: int) -> FinishReason | None:
        """Takes a sampled token; says whether, and why, it is the last one."""
        self.tokens.append(token)
        if self.stops_at(token):
            return "stop"
        return "length" if self._is_full(len(self.tokens), context) else None

    def stops_at(self, token: int) -> bool:
        """Whether the token, if it is drawn, ends the output."""
        params = self.request.params
        if token in params.stop_token_ids:
            return True
        return token in self.request.eos_ids and not params.ignore_eos

    def draws_after_next(self, context: int) -> bool:
        """Whether, once the next token is drawn and ends nothing, another is drawn by the device
        from nothing but what it then knows."""
        plain = self.is_plain and not self.ends_with_prompt and not self.request.params.has_penalty
        return plain and not self._is_full(len(self.tokens) + 1, context)

    def _is_full(self, n_tokens: int, context: int) -> bool:
        n_generated = n_tokens - len(self.request.prompt)
        return n_generated == self.request.params.max_tokens or n_tokens >= context


class Chunk(NamedTuple):
    """Computes tokens start..end of a sequence and takes logits of the last `rows` of them."""

    sequence: Sequence
    start: int
    end: int
    rows: int

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token is drawn from the last row."""
        sequence = self.sequence
        return self.end == len(sequence.tokens) and self.rows > 0 and not sequence.ends_with_prompt

    @property
    def prompt_rows(self) -> int:
        """How many of the rows, the first, are the prompt's own."""
        return self.rows - self.samples


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: tuple[Chunk, ...]


class ChunkResult(NamedTuple):
    """`token` is sampled from the last row (None: none was, or there is no row at all), and the
    last one if `ended`; `logits` for prompt_logits; `error` says what of the
    request left no token to draw, for a NUMERICAL_ERROR."""

    token: int | None = None
    logits: FloatArray | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ended: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    plan: Plan
    chunks: tuple[ChunkResult, ...]
