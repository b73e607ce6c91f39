"""The shapes of log-probabilities in answers; `server.logprobs` fills them."""

from __future__ import annotations

from pydantic import BaseModel


class TopLogprob(BaseModel):
    """`token` is `bytes:` with escapes where `bytes` are no text by themselves."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Four lists of the same length. With `echo` the first token has null for want of any."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each token of the prompt, null for the first: by token id its own entry and the likeliest."""
