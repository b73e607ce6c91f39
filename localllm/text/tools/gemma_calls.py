"""Calls in Gemma 4's own notation: `call:f{key:<|"|>value<|"|>,other:3}`."""

from __future__ import annotations

import json

from localllm.text.tools.call import OpenCall, expect, read_word
from localllm.text.tools.formats import GEMMA_QUOTE
from localllm.text.tools.json_text import as_json, escaped, read_value
from localllm.text.tools.reader import Read, Reader


def gemma_call(reader: Reader, call: OpenCall) -> Read[None]:
    yield from expect("call:", reader)
    call.begin((yield from read_word(reader)))
    yield from reader.spaces()
    if (yield from reader.peek()) == "{":
        yield from _value(reader, call)


def _value(reader: Reader, call: OpenCall) -> Read[None]:
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
        yield from _scalar(reader, call)
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
        yield from _value(reader, call)


def _scalar(reader: Reader, call: OpenCall) -> Read[None]:
    text = ""
    while (c := (yield from reader.peek())) and c not in ",}]":
        text += c
        reader.skip(1)
    if c:
        call.arguments(as_json(text))
