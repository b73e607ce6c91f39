"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from localllm.server.protocol.base import RequestBody
from localllm.server.protocol.sampling import SAMPLING_NOT_HONOURED, SamplingFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024
MAX_SEQUENCES = 2048  # prompts times n

TokenIds = Annotated[list[int], Field(min_length=1)]
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
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
    }

    model: str | None = None
    prompt: Prompt
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The batch; one prompt is a batch of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeRequest(RequestBody):
    """Either dialect: `content` with `add_special` (off unless asked for, as in llama.cpp), or
    `prompt` with `add_special_tokens` (on unless asked not to, as in vLLM)."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True

    @property
    def adds_special(self) -> bool:
        asked = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.content is None if asked is None else asked


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[int]
