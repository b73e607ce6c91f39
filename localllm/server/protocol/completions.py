"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from localllm.errors import RequestError
from localllm.sampling_params import SamplingParams
from localllm.server.protocol.base import MAX_TOKEN_IDS, not_supported
from localllm.server.protocol.sampling import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    SAMPLING_NOT_HONOURED,
    SamplingFields,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024
MAX_SEQUENCES = 2048  # prompts times n

TokenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
Prompt = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(SamplingFields):
    """`model` may be anything: one model is served, and the answer carries its name.

    Text is tokenized as the model's own: special tokens in it are parsed, and the vocabulary's
    beginning-of-sequence token goes in front where the model wants one.
    """

    not_honoured: ClassVar = SAMPLING_NOT_HONOURED | {
        "suffix": ("",),
        "top_logprobs": (0,),
    }

    model: str | None = None
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Answers to draw, of which the n with the likeliest tokens are given"
    )
    echo: bool | None = Field(None, description="The text and the logprobs begin with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def n_drawn(self) -> int:
        """Answers that are drawn for each prompt."""
        return self.best_of or self.n or 1

    @property
    def top_logprobs_wanted(self) -> int | None:
        ranked = self.n_drawn > (self.n or 1)
        return 0 if self.logprobs is None and ranked else self.logprobs

    def sampling_params(self, vocab_size: int, max_tokens: int | None) -> SamplingParams:
        if self.n_drawn < (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of}, less than the {self.n} of n", param="best_of"
            )
        if self.stream and self.n_drawn > (self.n or 1):
            raise not_supported("best_of", "not in a stream")
        params = super().sampling_params(vocab_size, max_tokens)
        params = replace(params, n=self.n_drawn)
        if self.echo and self.logprobs is not None:
            most = max(self.logprobs, self.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=most)
        return params

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The batch; one prompt is a batch of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
