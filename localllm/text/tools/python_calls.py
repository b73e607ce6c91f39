"""Calls as Python writes them: `f(key='value', other=3)`."""

from __future__ import annotations

from localllm.text.tools.call import ObjectWriter, OpenCall, expect, read_word
from localllm.text.tools.json_text import as_json
from localllm.text.tools.reader import Read, Reader
from localllm.text.valid_unicode import valid_unicode


def python_call(reader: Reader, call: OpenCall) -> Read[None]:
    call_name = yield from read_word(reader)
    yield from expect("(", reader)
    call.begin(call_name)
    writer = ObjectWriter(call)
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
        mark = yield from reader.until(["=", ")"], key.append)
        if mark is None and reader.cut_off:
            return
        if mark != "=":
            break
        writer.key("".join(key).strip())
        yield from reader.spaces()
        yield from _value(reader, writer)
    writer.close()


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}


def _value(reader: Reader, writer: ObjectWriter) -> Read[None]:
    quote = yield from reader.peek()
    if quote not in ("'", '"') or not quote:
        text: list[str] = []
        yield from _literal(reader, text)
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
                c = _ESCAPES.get(c, c)
        writer.text(c)


def _code_point(digits: str) -> str:
    try:
        return valid_unicode(chr(int(digits, 16)))
    except ValueError:
        return digits


def _literal(reader: Reader, text: list[str]) -> Read[None]:
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
