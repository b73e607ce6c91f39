"""A call that is being read, and what its readers share."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Container
from typing import Protocol

from localllm.text.tools.events import Arguments, CallBegins, CallEnds, Event
from localllm.text.tools.json_text import escaped
from localllm.text.tools.reader import Read, Reader

_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.\-]")


class NotACallError(Exception):
    """The text looked like the beginning of a call, and is none."""


class CallIds(Protocol):
    def __call__(self) -> str: ...


def random_id(length: int | None) -> str:
    """OpenAI's kind of id, or exactly `length` letters and digits."""
    if length is None:
        return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


class OpenCall:
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

    def close(self) -> None:
        """All of it has been read: without arguments by now it has none."""
        if self._empty:
            self.arguments("{}")

    def end(self) -> None:
        """Closes it too, unless the text was cut off here."""
        if not self._reader.cut_off:
            self.close()
        self._emit(CallEnds(self._index))


def read_word(reader: Reader) -> Read[str]:
    """A tool's name, with the space before it."""
    yield from reader.spaces()
    name = ""
    while _NAME.match(c := (yield from reader.peek())):
        name += c
        reader.skip(1)
    if not name or reader.ended:
        raise NotACallError
    return name


def expect(literal: str, reader: Reader, call: OpenCall | None = None) -> Read[None]:
    if not (yield from reader.accept(literal)) and not (call and call.begun):
        raise NotACallError


class ObjectWriter:
    """Arguments that come one by one, as one JSON object."""

    def __init__(self, call: OpenCall) -> None:
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
