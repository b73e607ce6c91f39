"""From the body of a chat request to the prompt's tokens, and to what is expected of the answer."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import RequestError
from localllm.grammar import ThinkingBudget
from localllm.sampling_params import SamplingParams
from localllm.server.output_format import OutputFormat
from localllm.server.protocol.base import not_supported
from localllm.server.protocol.chat import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    TemplateFields,
)
from localllm.text.bound import TextBound
from localllm.text.chat_template import ChatTemplate
from localllm.text.reasoning import ReasoningFormat, Thinking, state_after
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools import generic
from localllm.text.tools.formats import AnyFormat, ChannelFormat, ToolFormat
from localllm.text.tools.grammar import Calls, answer_grammar

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_END = 32  # tokens of a prompt, enough for every mark of thinking
_NEVER = -1e4
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ChatPrompt:
    """`params` are those of the request with what its tools and its thinking ask for."""

    ids: list[int]
    params: SamplingParams
    output: OutputFormat


def prepare_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    body: ChatRequest,
    params: SamplingParams,
    bound: TextBound,
) -> ChatPrompt:
    """RequestError when messages, tools or arguments do not do."""
    choice = body.chosen_tools
    ids = encode_chat(template, body.messages, body, bound)
    format = _call_format(template)
    reasoning, in_channels = template.reasoning_format, False
    if isinstance(format, ChannelFormat):
        reasoning, in_channels = format.reasoning, True
    thinking = Thinking.POSSIBLE
    if reasoning:
        thinking = state_after(tokenizer.decode(ids[-_END:], skip_special=False), reasoning)
    if body.thinking_tokens is not None:
        ids, thinking, params = _limit_thinking(
            ids, reasoning, thinking, params, body.thinking_tokens, tokenizer
        )
    wanted = None
    if choice.callable:
        wanted = Calls(format, choice.callable, choice.required, choice.single)
    known = format if wanted or in_channels else None
    grammar = answer_grammar(wanted, params.grammar, known, tokenizer, reasoning, thinking)
    params = replace(params, grammar=grammar)
    if choice.forbidden:
        params = _forbid_calls(format, tokenizer, params)
    output = OutputFormat(known, choice.callable, reasoning, thinking, choice.required)
    return ChatPrompt(ids, params, output)


def encode_chat(
    template: ChatTemplate,
    conversation: Sequence[ChatMessage],
    body: TemplateFields,
    bound: TextBound,
) -> list[int]:
    """The prompt's token ids; RequestError when messages or arguments do not do, or `bound`
    refuses the prompt."""
    messages = plain_messages(conversation)
    format = _call_format(template)
    tools: Sequence[Any] | None = body.chosen_tools.definitions or None
    if isinstance(format, ToolFormat):
        if format.id_length is not None:
            messages = [_with_short_ids(message, format.id_length) for message in messages]
        if not template.shows_calls:
            messages = generic.with_plain_calls(messages, generic.format_for(format))
        if tools and not _knows_tools(template):
            messages, tools = generic.with_tools(messages, tools, format), None
    return template.encode(
        messages,
        bound,
        tools=tools,
        documents=body.documents or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        **_template_arguments(body),
    )


def _knows_tools(template: ChatTemplate) -> bool:
    return template.supports_tools and template.call_format is not None


def _call_format(template: ChatTemplate) -> AnyFormat:
    if template.call_format is not None and template.supports_tools:
        return template.call_format
    return generic.format_for(template.call_format)


def _limit_thinking(
    ids: list[int],
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
    params: SamplingParams,
    budget: int,
    tokenizer: Tokenizer,
) -> tuple[list[int], Thinking, SamplingParams]:
    """The prompt begins the thinking, where it left that to the model."""
    if reasoning is None:
        raise not_supported("thinking_budget", "this model marks no thinking")
    if thinking == Thinking.OVER:
        return ids, thinking, params
    if thinking == Thinking.POSSIBLE:
        ids = ids + tokenizer.encode(reasoning.opens, add_special=False, parse_special=True)
    end = reasoning.closes.strip()
    forced = tokenizer.encode(f"\n{end}", add_special=False, parse_special=True)
    limit = ThinkingBudget(max_tokens=budget, end=(end,), forced=tuple(forced))
    return ids, Thinking.OPEN, replace(params, thinking_budget=limit)


def _forbid_calls(
    format: AnyFormat, tokenizer: Tokenizer, params: SamplingParams
) -> SamplingParams:
    """Keeps the model from what its calls begin with, where that is a mark of its own."""
    marks = [format.opens or format.begins] if isinstance(format, ToolFormat) else []
    mark = "".join(marks).strip()
    if not mark:
        return params
    token = tokenizer.special_tokens.get(mark)
    if token is not None and not tokenizer.token_bytes(token):
        return replace(params, logit_bias={**params.logit_bias, token: _NEVER})
    return replace(params, bad_words=(*params.bad_words, mark))


def _template_arguments(body: TemplateFields) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in arguments:
            raise RequestError(
                f"chat_template_kwargs must not set {name}: the request has a field for it",
                param="chat_template_kwargs",
            )
    if body.enable_thinking is not None:
        arguments.setdefault("enable_thinking", body.enable_thinking)
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            arguments.setdefault("enable_thinking", False)
    if body.thinking_tokens is not None:  # Seed-OSS is told, and told again as it goes
        arguments.setdefault("thinking_budget", body.thinking_tokens)
    if "enable_thinking" in arguments:  # by another name in DeepSeek's and Granite's templates
        arguments.setdefault("thinking", arguments["enable_thinking"])
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
    thought = plain.get("reasoning_content") or plain.get("reasoning")
    if isinstance(thought, str) and message.role == "assistant":
        plain["reasoning_content"] = thought
        if not (message.tool_calls and message.content):  # gpt-oss takes one beside calls
            plain.setdefault("thinking", thought)
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


def _with_short_ids(message: dict[str, Any], length: int) -> dict[str, Any]:
    """Ids of calls, which other servers make longer, as the template wants them."""
    changed = dict(message)
    if isinstance(id := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(id, length)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short(call.get("id") or "", length)} for call in calls
        ]
    return changed


def _short(id: str, length: int) -> str:
    if len(id) == length and id.isascii() and id.isalnum():
        return id
    digest = hashlib.sha256(id.encode()).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:length])
