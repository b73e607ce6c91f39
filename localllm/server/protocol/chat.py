"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.errors import RequestError
from localllm.server.protocol.base import MAX_MESSAGES, RequestBody
from localllm.server.protocol.sampling import (
    MAX_TOP_LOGPROBS,
    SAMPLING_NOT_HONOURED,
    SamplingFields,
)
from localllm.server.tool_choice import ToolChoice

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(RequestBody):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(RequestBody):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(RequestBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestBody):
    """Fields beyond these go to the template as they are."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class TemplateFields(RequestBody):
    """What the chat template is told beside the messages."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, a function by its name, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = Field(None, description="Goes to the chat template")
    enable_thinking: bool | None = Field(None, description="Goes to the chat template")
    thinking_budget: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Tokens of thinking; when they are spent, the thinking is ended"
    )
    reasoning_budget: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Another name of thinking_budget"
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chosen_tools(self) -> ToolChoice:
        """RequestError where tools and tool_choice do not fit together."""
        return ToolChoice.of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def thinking_tokens(self) -> int | None:
        return self.reasoning_budget if self.thinking_budget is None else self.thinking_budget


TEMPLATE_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(TemplateFields, SamplingFields):
    """`model` may be anything: one model is served, and the answer carries its name."""

    not_honoured: ClassVar = (
        SAMPLING_NOT_HONOURED
        | TEMPLATE_NOT_HONOURED
        | {
            "audio": (),
            "echo": (False,),
            "function_call": ("none", "auto"),
            "functions": ([],),
            "modalities": (["text"], []),
            "verbosity": ("medium",),
            "web_search_options": (),
        }
    )

    instead: ClassVar = {
        "functions": "send tools, which took its place",
        "function_call": "send tool_choice, which took its place",
    }

    model: str | None = None
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Goes before max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        if not self.logprobs and self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        return self.max_completion_tokens
