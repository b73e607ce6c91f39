"""Reading JSON from a growing text, and writing it in pieces."""

from __future__ import annotations

import ast
import json
from typing import Any

from localllm.text.tools.reader import Emit, Read, Reader

_CLOSERS = {"{": "}", "[": "]"}
_SCALAR_ENDS = ",}] \t\r\n"


def read_value(reader: Reader, emit: Emit) -> Read[None]:
    """Emits a JSON value as it is written, as it comes; stops where it ends."""
    first = yield from reader.peek()
    if first in _CLOSERS:
        yield from _read_nested(reader, emit)
    elif first == '"':
        emit(json.dumps((yield from read_string(reader)), ensure_ascii=False))
    else:
        while (c := (yield from reader.peek())) and c not in _SCALAR_ENDS:
            emit(c)
            reader.skip(1)


def _read_nested(reader: Reader, emit: Emit) -> Read[None]:
    depth, in_string, escaped = 0, False, False
    while text := (yield from reader.some()):
        for at, c in enumerate(text):
            if in_string:
                in_string = escaped or c != '"'
                escaped = c == "\\" and not escaped
            elif c == '"':
                in_string = True
            elif c in "{[":
                depth += 1
            elif c in "}]":
                depth -= 1
                if not depth:
                    emit(text[: at + 1])
                    reader.skip(at + 1)
                    return
        emit(text)
        reader.skip(len(text))


def read_string(reader: Reader) -> Read[str]:
    """What a JSON string says; as much as there is where the text ends."""
    reader.skip(1)
    raw, escaped = "", False
    while c := (yield from reader.peek()):
        reader.skip(1)
        if c == '"' and not escaped:
            break
        escaped = c == "\\" and not escaped
        raw += c
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return raw


def escaped(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_of(text: str) -> Any:
    """The value of JSON or of a Python literal; the text itself where it is neither.

    Some templates show models values as Python prints them.
    """
    text = text.strip()
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value


def as_json(text: str) -> str:
    """JSON of `value_of(text)`, kept as it is written where it is JSON already."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(value_of(text), ensure_ascii=False)
    return text.strip()
