"""Finding out what a template can do, by trying it on small conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from localllm.text.templates.messages import Capabilities, Message

Attempt: TypeAlias = Callable[[list[Message], list[Message] | None], str | None]
"""Renders messages with tools; None if the template refuses or fails."""

_TEXT = "Xq7textXq7"
_SYSTEM = "Xq7systemXq7"
_TOOL = "Xq7toolXq7"
_KEY = "Xq7keyXq7"
_VALUE = "Xq7valueXq7"

_USER: Message = {"role": "user", "content": _TEXT}
_DEFINITION: Message = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "What to look for."}},
            "required": [_KEY],
        },
    },
}


def probe(attempt: Attempt, developer_role: bool) -> Capabilities:
    typed = _needs_typed_content(attempt)
    wrap: Callable[[str], Any] = _parts if typed else str
    user = {"role": "user", "content": wrap(_TEXT)}
    null_tools = attempt([user], None) is not None or attempt([user], []) is None
    no_tools: list[Message] | None = None if null_tools else []
    system = {"role": "system", "content": wrap(_SYSTEM)}
    object_arguments, null_content = _tool_call_style(attempt, user, wrap)
    return Capabilities(
        typed_content=typed,
        system_role=_SYSTEM in (attempt([system, user], no_tools) or ""),
        developer_role=developer_role,
        tools=_TOOL in (attempt([user], [_DEFINITION]) or ""),
        object_arguments=object_arguments,
        null_content=null_content,
        null_tools=null_tools,
    )


def _parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def _needs_typed_content(attempt: Attempt) -> bool:
    if _TEXT in (attempt([_USER], None) or attempt([_USER], []) or ""):
        return False
    rendered = attempt([{"role": "user", "content": _parts(_TEXT)}], None) or ""
    return _TEXT in rendered and "'type'" not in rendered


def _tool_call_style(
    attempt: Attempt, user: Message, wrap: Callable[[str], Any]
) -> tuple[bool, bool]:
    """Whether arguments are objects, and whether the content may be None; both usual if neither
    works."""
    for arguments in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'):
        for content in (None, wrap("")):
            call = {
                "id": "call12345",
                "type": "function",
                "function": {"name": _TOOL, "arguments": arguments},
            }
            conversation: list[Message] = [
                user,
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {
                    "role": "tool",
                    "content": wrap(_TEXT),
                    "tool_call_id": "call12345",
                    "name": _TOOL,
                },
            ]
            if _shows_call(attempt(conversation, [_DEFINITION]), with_none=content is None):
                return isinstance(arguments, dict), content is None
    return True, False


def _shows_call(rendered: str | None, *, with_none: bool) -> bool:
    if rendered is None or _VALUE not in rendered or (with_none and "None" in rendered):
        return False
    python_text, escaped_twice = f"'{_VALUE}'", f'\\"{_VALUE}'
    return python_text not in rendered and escaped_twice not in rendered
