"""From the body of a chat request to the prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.errors import RequestError
from localllm.server.protocol.chat import ChatMessage, ChatRequest, ContentPart
from localllm.text.chat_template import ChatTemplate

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def encode_chat(template: ChatTemplate, body: ChatRequest) -> list[int]:
    """The prompt's token ids; RequestError when messages or arguments do not do."""
    tools = None if body.tool_choice == "none" else body.tools
    if tools and not template.supports_tools:
        raise RequestError(
            "tools: the chat template of this model does not know tools",
            param="tools",
            code="unsupported_parameter",
        )
    return template.encode(
        plain_messages(body.messages),
        tools=tools or None,
        documents=body.documents or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        **_template_arguments(body),
    )


def _template_arguments(body: ChatRequest) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in arguments:
            raise RequestError(
                f"chat_template_kwargs must not set {name}: the request has a field for it",
                param="chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return arguments


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Dictionaries as `ChatTemplate` takes them; RequestError for content other than text."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = [
            {"type": "text", "text": _text(part, f"{where}.content[{at}]")}
            for at, part in enumerate(message.content)
        ]
    return plain


def _text(part: ContentPart, where: str) -> str:
    texts = {"text": part.text, "refusal": part.refusal}
    if part.type not in texts:
        raise RequestError(
            f"{where}: content of type {part.type!r} is not supported by this server, only text",
            param=where,
            code="unsupported_content",
        )
    if (text := texts[part.type]) is None:
        raise RequestError(f"{where}.{part.type}: this field is required", param=where)
    return text
