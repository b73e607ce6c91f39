"""Tools for models whose chat template knows none: told in words, called in a plain format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.text.tools.formats import (
    AnyFormat,
    JsonCall,
    NamedCall,
    PythonCall,
    ToolFormat,
)
from localllm.text.tools.table import HERMES

Message = dict[str, Any]

_PROMPT = """\
You can call functions. Each line here defines one:
{definitions}

To call a function, answer with its name and its arguments in exactly this form:
{example}
{several}The result comes in the next message. Call a function only when it helps to answer; \
otherwise answer in plain words."""
_DESCRIBED = (JsonCall, NamedCall, PythonCall)
_SEVERAL = "Several calls follow each other in the same form. "
_EXAMPLE = ("name_of_the_function", '{"name_of_an_argument": "its value"}')


def format_for(known: AnyFormat | None) -> ToolFormat:
    """The model's own format where it can be described in words, else the most common one."""
    if isinstance(known, ToolFormat) and isinstance(known.body, _DESCRIBED):
        return known
    return HERMES


def prompt(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    definitions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return _PROMPT.format(
        definitions="\n".join(definitions),
        example=written([_EXAMPLE], format),
        several=_SEVERAL if format.parallel else "",
    )


def written(calls: Sequence[tuple[str, str]], format: ToolFormat) -> str:
    """Names and arguments as the model would have written them."""
    one = [
        f"{format.begins}{_call(format, name, arguments, index)}{format.ends}"
        for index, (name, arguments) in enumerate(calls)
    ]
    inner = format.between.join(one)
    return format.opens + (f"[{inner}]" if format.listed else inner) + format.closes


def _call(format: ToolFormat, name: str, arguments: str, index: int) -> str:
    match format.body:
        case NamedCall(before=before, after=after) as body:
            number = f":{index}" if body.number_in_id else ""
            return f"{before}{name}{number}{after}{arguments}"
        case JsonCall(name_key=name_key, arguments_key=arguments_key):
            named = f"{json.dumps(name_key)}: {json.dumps(name)}"
            return f"{{{named}, {json.dumps(arguments_key)}: {arguments}}}"
        case PythonCall():
            values = json.loads(arguments)
            pairs = [f"{key}={json.dumps(values[key], ensure_ascii=False)}" for key in values]
            return f"{name}({', '.join(pairs)})"
    raise ValueError(f"calls in the format {format.name} cannot be described in words")


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """The conversation with the tools told in its first system message."""
    text = prompt(tools, format)
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_plain_calls(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """Calls as part of what the assistant said, results as messages of the user."""
    return [_plain(message, format) for message in messages]


def _plain(message: Message, format: ToolFormat) -> Message:
    if calls := message.get("tool_calls"):
        pairs = [(call["function"]["name"], _arguments(call["function"])) for call in calls]
        said = [_text(message), written(pairs, format)]
        content = "\n".join(text for text in said if text)
        return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": content}
    if message["role"] == "tool":
        content = f"<tool_response>\n{_text(message)}\n</tool_response>"
        return {"role": "user", "content": content}
    return message


def _arguments(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments or {}, ensure_ascii=False)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""
