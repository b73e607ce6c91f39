"""Calls whose name, keys and values stand between tags."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.tools.call import NotACallError, ObjectWriter, OpenCall, read_word
from localllm.text.tools.formats import TaggedCall
from localllm.text.tools.json_text import as_json
from localllm.text.tools.reader import Read, Reader
from localllm.text.tools.schema import Tool


def tagged_call(
    body: TaggedCall, reader: Reader, call: OpenCall, tools: Mapping[str, Tool]
) -> Read[None]:
    if body.name[0].strip() and not (yield from reader.accept(body.name[0].strip())):
        raise NotACallError
    call.begin((yield from read_word(reader)))
    tool = tools.get(call.name, Tool(call.name))
    yield from reader.accept(body.name[1].strip())
    writer = ObjectWriter(call)
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
    body: TaggedCall, reader: Reader, writer: ObjectWriter, tool: Tool
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
        writer.value(as_json("".join(value)))
