"""The bodies of answers. Chunks of a stream are plain dictionaries: see `chunks`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from localllm.server.protocol.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

EndReason = Literal["stop", "length"]
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorBody


class PromptTokensDetails(BaseModel):
    """`truncated_tokens` were cut off at the request's own wish, and are counted nowhere else."""

    cached_tokens: int
    truncated_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """How long an answer took, as llama.cpp tells it. A rate without a time is 0."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CalledFunction(BaseModel):
    """`arguments` is JSON, unless the answer was cut off in it."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """`content` is null beside calls. Thinking has two names, for clients that know either."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: EndReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    timings: Timings


_LEFT_OUT = ("prompt_logprobs", "reasoning_content", "reasoning", "tool_calls")


def dump(answer: ChatCompletion | Completion) -> dict[str, Any]:
    """As it is sent: without what nobody asked for, and what there is not."""
    content = answer.model_dump()
    messages = [choice["message"] for choice in content["choices"] if "message" in choice]
    for part in (content, *content["choices"], *messages):
        for name in _LEFT_OUT:
            if part.get(name, ()) is None:
                del part[name]
    return content


class Capabilities(BaseModel):
    """What the model, or its chat template, can do here."""

    chat: bool
    completion: bool
    tools: bool
    reasoning: bool
    structured_outputs: bool


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["localllm"] = "localllm"
    max_model_len: int
    context_length: int
    quantization: str
    capabilities: Capabilities
    meta: dict[str, Any]


class SpecialTokens(BaseModel):
    """As the vocabulary writes them; null where it has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class ModelDetails(ModelCard, SpecialTokens):
    """Everything that can be told of a model and of what runs it."""

    chat_template: str
    architecture: str
    backend: str
    device: str
    threads: int
    kv_cache_bytes: int
    max_num_seqs: int
    modalities: dict[str, bool]
    build: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class TokenizerInfo(SpecialTokens):
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    chat_template: str


class Prompt(BaseModel):
    prompt: str
    count: int


class Text(BaseModel):
    content: str
    prompt: str


class Health(BaseModel):
    """`kv_usage` is the share of KV blocks that live sequences hold, 0 to 1."""

    status: Literal["ok", "loading", "draining", "unavailable", "failed"]
    detail: str
    version: str
    uptime_seconds: float
    model: str | None = None
    architecture: str | None = None
    backend: str | None = None
    device: str | None = None
    threads: int | None = None
    context_length: int | None = None
    kv_cache_bytes: int | None = None
    kv_usage: float
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
