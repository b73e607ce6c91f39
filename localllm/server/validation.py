"""Pydantic's list of errors as one sentence and the name of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SCALAR_TAGS = frozenset({"str", "int", "float", "bool", "none"})


def describe_validation_error(errors: Sequence[Any]) -> tuple[str | None, str]:
    """The parameter at fault and what is wrong with it.

    A value that fits no member of a union brings one error for each member; they count as one.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return None, f"The request body is not valid JSON: {first['ctx']['error']}"
    path = _path(first["loc"])
    if not path:
        return None, "The request body must be a JSON object"
    reasons = dict.fromkeys(_reason(e) for e in errors if _path(e["loc"])[: len(path)] == path)
    param = _dotted(path)
    return param, f"{param}: {' or '.join(reasons)}"


def _path(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """Field names and list indices; ends where pydantic starts to name members of a union."""
    path: list[str | int] = []
    for part in loc[1:] if loc and loc[0] in ("body", "path", "query") else loc:
        if isinstance(part, str) and (part in _SCALAR_TAGS or "[" in part):
            break
        path.append(part)
    return tuple(path)


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _reason(error: Any) -> str:
    if error["type"] == "missing":
        return "this field is required"
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
