"""One sequence as the scheduler sees it, and what a step does with it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from localllm.engine.kv_manager import SequenceBlocks
from localllm.engine.messages import FinishReason, Submit

if TYPE_CHECKING:
    from localllm.backends.program import FloatArray

NUMERICAL_ERROR = -1  # what a backend samples from logits that are no numbers


class Sequence:
    """Known tokens, how many of them are computed, and the blocks that hold those."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "order",
        "request",
        "rows_sent",
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
        self.rows_sent = 0  # prompt positions whose logits have been sent, for prompt_logits

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
        return self.rows_sent if self.request.prompt_logits else len(self.tokens) - 1

    def append(self, token: int, context: int) -> FinishReason | None:
        """Takes a sampled token; says whether, and why, it is the last one."""
        self.tokens.append(token)
        params = self.request.params
        if token in params.stop_token_ids:
            return "stop"
        if token in self.request.eos_ids and not params.ignore_eos:
            return "stop"
        if self.n_generated == params.max_tokens or len(self.tokens) >= context:
            return "length"
        return None


class Chunk(NamedTuple):
    """Computes tokens start..end of a sequence and takes logits of the last `rows` of them."""

    sequence: Sequence
    start: int
    end: int
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: tuple[Chunk, ...]


class ChunkResult(NamedTuple):
    """`token` is sampled from the last row (None: there was none); `logits` for prompt_logits."""

    token: int | None = None
    logits: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    plan: Plan
    chunks: tuple[ChunkResult, ...]
