"""Calls whose arguments are JSON."""

from __future__ import annotations

import json

from localllm.text.tools.call import NotACallError, OpenCall, expect, read_word
from localllm.text.tools.formats import JsonCall, NamedCall
from localllm.text.tools.json_text import read_string, read_value
from localllm.text.tools.reader import Read, Reader

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_FARTHEST_BRACE = 64


def json_call(body: JsonCall, reader: Reader, call: OpenCall) -> Read[None]:
    yield from expect("{", reader)
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
        yield from expect(":", reader, call)
        yield from reader.spaces()
        if key in (body.arguments_key, *_ARGUMENTS):
            yield from read_arguments(reader, call)
        else:
            value: list[str] = []
            yield from read_value(reader, value.append)
            if key in (body.name_key, "name") and not reader.ended:
                call.begin(_as_name("".join(value)))
    if (yield from reader.accept("}")) and call.begun:
        call.close()


def _as_name(value: str) -> str:
    try:
        name = json.loads(value)
    except ValueError:
        raise NotACallError from None
    if not isinstance(name, str) or not name:
        raise NotACallError
    return name


def keyed_call(reader: Reader, call: OpenCall) -> Read[None]:
    yield from expect("{", reader)
    yield from reader.spaces()
    if (yield from reader.peek()) != '"':
        raise NotACallError
    name = yield from read_string(reader)
    yield from reader.spaces()
    yield from expect(":", reader)
    call.begin(name)
    yield from read_arguments(reader, call)
    yield from reader.spaces()
    yield from reader.accept("}")


def named_call(body: NamedCall, reader: Reader, call: OpenCall) -> Read[None]:
    yield from reader.accept(body.before)
    name = yield from read_word(reader)
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


def read_arguments(reader: Reader, call: OpenCall) -> Read[None]:
    """An object; one that is written into a string is taken out of it, null is none."""
    yield from reader.spaces()
    first = yield from reader.peek()
    if first == "{":
        yield from read_value(reader, call.arguments)
        return
    if first == '"':
        text = yield from read_string(reader)
        call.arguments(text if reader.cut_off else text.strip() or "{}")
        return
    scalar: list[str] = []
    yield from read_value(reader, scalar.append)
    value = "".join(scalar)
    no_arguments = value in ("", "null", "None") and not reader.cut_off
    call.arguments("{}" if no_arguments else value)
