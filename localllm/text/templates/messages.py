"""What messages have to become before a template can take them.

Clients send what OpenAI's API takes; templates differ in what they know of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.errors import RequestError

Message: TypeAlias = dict[str, Any]

_SEPARATOR = "\n\n"
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Capabilities:
    """What a template does with messages, found out by trying.

    `typed_content`: content is a list of parts, not a string.
    `system_role`: system messages appear in the prompt.
    `developer_role`: the template treats that role apart.
    `tools`: tool definitions appear in the prompt.
    `object_arguments`: arguments of tool calls are objects, not JSON in a string.
    `null_content`: the content beside tool calls may be None.
    `null_tools`: without tools they are None, as in transformers, not an empty list.
    """

    typed_content: bool = False
    system_role: bool = True
    developer_role: bool = False
    tools: bool = False
    object_arguments: bool = True
    null_content: bool = False
    null_tools: bool = True


def adapt(messages: Iterable[Mapping[str, Any]], can: Capabilities) -> list[Message]:
    """Messages as this template expects them; RequestError for those that it cannot show."""
    adapted = [_adapt_message(message, can) for message in messages]
    _name_tool_results(adapted)
    if not can.system_role:
        adapted = fold_system(adapted)
    return adapted


def _adapt_message(message: Mapping[str, Any], can: Capabilities) -> Message:
    _check(message)
    adapted = dict(message)
    if adapted.get("role") == "developer" and not can.developer_role:
        adapted["role"] = "system"
    content = adapted.get("content")
    if content is None:
        has_calls = bool(adapted.get("tool_calls"))
        adapted["content"] = None if has_calls and can.null_content else ""
    elif can.typed_content:
        adapted["content"] = [{"type": "text", "text": text} for text in _texts(content)]
    else:
        adapted["content"] = "".join(_texts(content))
    if adapted.get("tool_calls"):
        adapted["tool_calls"] = [_adapt_call(call, can) for call in adapted["tool_calls"]]
    else:
        adapted.pop("tool_calls", None)
    return adapted


def _check(message: Mapping[str, Any]) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("each message needs a role", param="messages")
    if not isinstance(message.get("content"), str | list | None):
        raise RequestError("content is neither text nor a list of parts", param="messages")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise RequestError("tool_calls is not a list of calls with functions", param="messages")


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("id"), str | None)
        and isinstance(call.get("function"), Mapping)
    )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RequestError(
                f"content parts of type {kind!r} are not supported by this model", param="messages"
            )
        texts.append(part["text"])
    return texts


def _adapt_call(call: Mapping[str, Any], can: Capabilities) -> Message:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if can.object_arguments and isinstance(arguments, str):
        function["arguments"] = _parsed(arguments)
    elif not can.object_arguments and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _parsed(arguments: str) -> Any:
    """The object that a model wrote; its text where it is none, as models do make mistakes."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _name_tool_results(messages: Sequence[Message]) -> None:
    """Some templates print the tool's name, of which clients send only the call's id."""
    names: dict[str | None, Any] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"].get("name")
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(answered, str) and answered in names:
            message.setdefault("name", names[answered])


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Moves what system messages say to the beginning of the first turn of the user."""
    system = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    if not system:
        return others
    first = next((i for i, m in enumerate(others) if m.get("role") == "user"), None)
    if first is None:
        return [_joined([*system, {"role": "user", "content": ""}]), *others]
    others[first] = _joined([*system, others[first]])
    return others


def regular(messages: Sequence[Message]) -> list[Message]:
    """One system message, at the front, and no two turns of one role in a row."""
    system = [message for message in messages if message.get("role") == "system"]
    turns: list[Message] = [{**_joined(system), "role": "system"}] if system else []
    for message in messages:
        if message.get("role") == "system":
            continue
        if turns and _same_turn(turns[-1], message):
            turns[-1] = _joined([turns[-1], message])
        else:
            turns.append(message)
    return turns


def _same_turn(before: Message, after: Message) -> bool:
    calls = before.get("tool_calls") or after.get("tool_calls")
    return before["role"] == after["role"] and before["role"] != "tool" and not calls


def _joined(messages: Sequence[Message]) -> Message:
    """The last message, with the content of all."""
    contents = [message["content"] for message in messages if message["content"]]
    if any(isinstance(content, list) for content in contents):
        content: Any = [part for content in contents for part in content]
    else:
        content = _SEPARATOR.join(contents)
    return {**messages[-1], "content": content}
