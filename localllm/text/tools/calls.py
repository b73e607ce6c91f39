"""Reading one call: its name and its arguments, which are emitted as JSON as they come."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from localllm.text.tools.events import Arguments, CallBegins, CallEnds, Event
from localllm.text.tools.formats import (
    GEMMA_QUOTE,
    Body,
    GemmaCall,
    JsonCall,
    KeyedCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from localllm.text.tools.json_text import as_json, escaped, read_string, read_value
from localllm.text.tools.reader import Read, Reader
from localllm.text.tools.schema import Tool, is_text

_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.\-]")
_NUMBERED = re.compile(r"(.+):\d+")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_FARTHEST_BRACE = 64


class NotACallError(Exception):
    """The text looked like the beginning of a call, and is none."""


class CallIds(Protocol):
    def __call__(self) -> str: ...


def random_id(length: int | None) -> str:
    """OpenAI's kind of id, or exactly `length` letters and digits."""
    if length is None:
        return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


class Call:
    """The call that is being read: turns what is found into events, the name first."""

    def __init__(
        self,
        index: int,
        new_id: CallIds,
        emit: Callable[[Event], None],
        reader: Reader,
        names: Container[str] | None = None,
    ) -> None:
        """`names`: the only ones that make it a call."""
        self.name = ""
        self._names = names
        self._index = index
        self._new_id = new_id
        self._emit = emit
        self._reader = reader
        self._early = ""
        self._empty = True

    @property
    def begun(self) -> bool:
        return bool(self.name)

    def begin(self, name: str, id: str | None = None) -> None:
        if self.begun:
            return
        if self._names is not None and name not in self._names:
            raise NotACallError
        self.name = name
        self._reader.forget()
        self._emit(CallBegins(self._index, id or self._new_id(), name))
        self.arguments(self._early)

    def arguments(self, text: str) -> None:
        """A fragment; those before the name wait for it."""
        if not self.begun:
            self._early += text
        elif text:
            self._empty = False
            self._emit(Arguments(self._index, text))

    def end(self) -> None:
        if self._empty:
            self.arguments("{}")
        self._emit(CallEnds(self._index))


def read_call(body: Body, reader: Reader, call: Call, tools: Mapping[str, Tool]) -> Read[None]:
    """NotACallError before the name is known; after it nothing is an error."""
    match body:
        case JsonCall():
            yield from _json_call(body, reader, call)
        case KeyedCall():
            yield from _keyed_call(reader, call)
        case NamedCall():
            yield from _named_call(body, reader, call)
        case TaggedCall():
            yield from _tagged_call(body, reader, call, tools)
        case PythonCall():
            yield from _python_call(reader, call)
        case GemmaCall():
            yield from _gemma_call(reader, call)
    if not call.begun:
        raise NotACallError


def read_arguments(reader: Reader, call: Call) -> Read[None]:
    """An object; one that is written into a string is taken out of it, null is none."""
    yield from reader.spaces()
    first = yield from reader.peek()
    if first == "{":
        yield from read_value(reader, call.arguments)
        return
    if first == '"':
        text = yield from read_string(reader)
        call.arguments(text.strip() or "{}")
        return
    scalar: list[str] = []
    yield from read_value(reader, scalar.append)
    value = "".join(scalar)
    call.arguments("{}" if value in ("", "null", "None") else value)


def _json_call(body: JsonCall, reader: Reader, call: Call) -> Read[None]:
    yield from _expect("{", reader)
    while True:
        yield from reader.spaces()
        c = yield from reader.peek()
        if c == ",":
            reader.skip(1)
            continue
        if c != '"':
            break
        key = yield from read_string(reader)
        if not call.begun and key not in (*_KEYS, body.name_key, body.arguments_key, body.id_key):
            raise NotACallError
        yield from reader.spaces()
        yield from _expect(":", reader, call)
        yield from reader.spaces()
        if key in (body.arguments_key, *_ARGUMENTS):
            yield from read_arguments(reader, call)
        else:
            value: list[str] = []
            yield from read_value(reader, value.append)
            if key in (body.name_key, "name") and not reader.ended:
                call.begin(as_name("".join(value)))
    yield from reader.accept("}")


def as_name(value: str) -> str:
    try:
        name = json.loads(value)
    except ValueError:
        raise NotACallError from None
    if not isinstance(name, str) or not name:
        raise NotACallError
    return name


def _keyed_call(reader: Reader, call: Call) -> Read[None]:
    yield from _expect("{", reader)
    yield from reader.spaces()
    if (yield from reader.peek()) != '"':
        raise NotACallError
    name = yield from read_string(reader)
    yield from reader.spaces()
    yield from _expect(":", reader)
    call.begin(name)
    yield from read_arguments(reader, call)
    yield from reader.spaces()
    yield from reader.accept("}")


def _named_call(body: NamedCall, reader: Reader, call: Call) -> Read[None]:
    yield from reader.accept(body.before)
    name = yield from _word(reader)
    id = None
    if body.number_in_id:
        number = ""
        while (c := (yield from reader.peek())) and (c == ":" or c.isdigit()):
            number += c
            reader.skip(1)
        id = f"{body.before}{name}{number}"
    for _ in range(_FARTHEST_BRACE):
        c = yield from reader.peek()
        if c in ("{", ""):
            break
        reader.skip(1)
    if c != "{":
        raise NotACallError
    call.begin(name, id)
    yield from read_value(reader, call.arguments)


def _word(reader: Reader) -> Read[str]:
    """A tool's name, with the space before it."""
    yield from reader.spaces()
    name = ""
    while _NAME.match(c := (yield from reader.peek())):
        name += c
        reader.skip(1)
    if not name or reader.ended:
        raise NotACallError
    return name


def _expect(literal: str, reader: Reader, call: Call | None = None) -> Read[None]:
    if not (yield from reader.accept(literal)) and not (call and call.begun):
        raise NotACallError


class _ObjectWriter:
    """Arguments that come one by one, as one JSON object."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._any = False

    def key(self, key: str) -> None:
        start = ", " if self._any else "{"
        self._any = True
        self._call.arguments(f"{start}{json.dumps(key, ensure_ascii=False)}: ")

    def value(self, text: str) -> None:
        self._call.arguments(text)

    def text(self, text: str) -> None:
        self._call.arguments(escaped(text))

    def close(self) -> None:
        self._call.arguments("}" if self._any else "{}")


def _tagged_call(
    body: TaggedCall, reader: Reader, call: Call, tools: Mapping[str, Tool]
) -> Read[None]:
    if body.name[0].strip() and not (yield from reader.accept(body.name[0].strip())):
        raise NotACallError
    call.begin((yield from _word(reader)))
    tool = tools.get(call.name, Tool(call.name))
    yield from reader.accept(body.name[1].strip())
    writer = _ObjectWriter(call)
    while True:
        yield from reader.spaces()
        if not (yield from reader.accept(body.key[0].strip())):
            break
        yield from _tagged_argument(body, reader, writer, tool)
        if reader.ended:
            return
    if (yield from reader.accept(body.end)) or not reader.ended:
        writer.close()


def _tagged_argument(
    body: TaggedCall, reader: Reader, writer: _ObjectWriter, tool: Tool
) -> Read[None]:
    key: list[str] = []
    text_mark = body.text_key.strip()
    ends = [mark for mark in (body.key[1].strip(), text_mark) if mark]
    mark = yield from reader.until(ends, key.append)
    if mark is None:
        return
    name = "".join(key).strip()
    if body.value[0].strip():
        yield from reader.spaces()
        yield from reader.accept(body.value[0].strip())
    elif body.value[0]:
        yield from reader.accept(body.value[0])
    is_string = mark == text_mark if text_mark else tool.is_text(name)
    writer.key(name)
    close = body.value[1].rstrip()
    if body.cdata and (yield from reader.accept("<![CDATA[")):
        close = "]]>" + close
    if is_string:
        writer.value('"')
        if (yield from reader.until([close, close.strip()], writer.text)):
            writer.value('"')
        return
    value: list[str] = []
    if (yield from reader.until([close, close.strip()], value.append)):
        writer.value(typed("".join(value), tool.argument(name)))


def typed(text: str, schema: Mapping[str, object]) -> str:
    """JSON of a value that is written bare."""
    if is_text(schema):
        return json.dumps(text, ensure_ascii=False)
    return as_json(text)


def _python_call(reader: Reader, call: Call) -> Read[None]:
    call_name = yield from _word(reader)
    yield from _expect("(", reader)
    call.begin(call_name)
    writer = _ObjectWriter(call)
    while True:
        yield from reader.spaces()
        c = yield from reader.peek()
        if c == ",":
            reader.skip(1)
            continue
        if not c:
            return
        if c == ")":
            reader.skip(1)
            break
        key: list[str] = []
        if (yield from reader.until(["=", ")"], key.append)) != "=":
            break
        writer.key("".join(key).strip())
        yield from reader.spaces()
        yield from _python_value(reader, writer)
    writer.close()


_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}


def _python_value(reader: Reader, writer: _ObjectWriter) -> Read[None]:
    quote = yield from reader.peek()
    if quote not in ("'", '"') or not quote:
        text: list[str] = []
        yield from _python_literal(reader, text)
        if not reader.ended:
            writer.value(as_json("".join(text)))
        return
    reader.skip(1)
    writer.value('"')
    while c := (yield from reader.peek()):
        reader.skip(1)
        if c == quote:
            writer.value('"')
            return
        if c == "\\":
            c = yield from reader.peek()
            reader.skip(len(c))
            if c == "u" and len(digits := (yield from reader.peek(4))) == 4:
                reader.skip(4)
                c = _code_point(digits)
            else:
                c = _PYTHON_ESCAPES.get(c, c)
        writer.text(c)


def _code_point(digits: str) -> str:
    try:
        return chr(int(digits, 16)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except ValueError:
        return digits


def _python_literal(reader: Reader, text: list[str]) -> Read[None]:
    """Up to the comma or bracket that ends a value which is no string."""
    depth, quote, escape = 0, "", False
    while c := (yield from reader.peek()):
        if quote:
            if c == quote and not escape:
                quote = ""
            escape = c == "\\" and not escape
        elif c in "\"'":
            quote = c
        elif not depth and c in ",)":
            return
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        text.append(c)
        reader.skip(1)


def _gemma_call(reader: Reader, call: Call) -> Read[None]:
    yield from _expect("call:", reader)
    call.begin((yield from _word(reader)))
    yield from reader.spaces()
    if (yield from reader.peek()) == "{":
        yield from _gemma_value(reader, call)


def _gemma_value(reader: Reader, call: Call) -> Read[None]:
    """Objects with bare keys, lists, quoted texts and scalars, to JSON."""
    if (yield from reader.accept(GEMMA_QUOTE)):
        call.arguments('"')
        if (yield from reader.until([GEMMA_QUOTE], lambda text: call.arguments(escaped(text)))):
            call.arguments('"')
        return
    opener = yield from reader.peek()
    if opener == '"':
        yield from read_value(reader, call.arguments)
        return
    if opener not in ("{", "["):
        yield from _gemma_scalar(reader, call)
        return
    reader.skip(1)
    call.arguments(opener)
    closer, first = {"{": "}", "[": "]"}[opener], True
    while True:
        yield from reader.spaces()
        c = yield from reader.peek()
        if not c:
            return
        if c in ("}", "]"):
            reader.skip(1)
            call.arguments(closer)
            return
        if c == ",":
            reader.skip(1)
            continue
        if not first:
            call.arguments(", ")
        first = False
        if opener == "{":
            key: list[str] = []
            if not (yield from reader.until([":"], key.append)):
                return
            name = "".join(key).replace(GEMMA_QUOTE, "").strip().strip('"')
            call.arguments(f"{json.dumps(name, ensure_ascii=False)}: ")
            yield from reader.spaces()
        yield from _gemma_value(reader, call)


def _gemma_scalar(reader: Reader, call: Call) -> Read[None]:
    text = ""
    while (c := (yield from reader.peek())) and c not in ",}]":
        text += c
        reader.skip(1)
    if c:
        call.arguments(as_json(text))
