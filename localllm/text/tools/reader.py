"""Reading a text that is still growing.

Reads are generators that yield while they need more text, so that a parser is written as if all of
the text were there, and does the same however the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Read: TypeAlias = Generator[None, None, T]
"""Ends with the result; every yield asks for more text."""

Emit: TypeAlias = Callable[[str], None]


class Reader:
    """`taken` is all text since `mark`, for a parser that finds out that it was wrong."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._final = False
        self._cut = False
        self.sure = False
        """Where the text is cut within what may be a mark, it was going to be one."""

    def push(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = None if self._mark is None else 0

    def finish(self, *, cut: bool = False) -> None:
        """No more text comes; `cut`: though more was to come."""
        self._final = True
        self._cut = cut

    @property
    def ended(self) -> bool:
        return self._final and self._at == len(self._text)

    @property
    def cut_off(self) -> bool:
        """The text has ended here, but not by itself."""
        return self._cut and self.ended

    def mark(self) -> None:
        self._mark = self._at

    def forget(self) -> None:
        self._mark = None

    @property
    def taken(self) -> str:
        return "" if self._mark is None else self._text[self._mark : self._at]

    def peek(self, n: int = 1) -> Read[str]:
        """The next n characters, fewer at the end of the text."""
        while len(self._text) - self._at < n and not self._final:
            yield
        return self._text[self._at : self._at + n]

    def some(self) -> Read[str]:
        """Whatever is there, at least a character; "" at the end of the text."""
        yield from self.peek()
        return self._text[self._at :]

    def skip(self, n: int) -> None:
        self._at += n

    def accept(self, literal: str) -> Read[bool]:
        """Takes `literal` if it is next; waits only while it may be.

        Where the text ends within it, what is there is taken too: it means nothing by itself.
        """
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(there):
                return False
            if self._final:
                self._at += len(there)
                return False
            yield

    def accept_any(self, literals: Sequence[str]) -> Read[str | None]:
        """Takes the first of `literals` that is next, if any."""
        for literal in literals:
            if literal and (yield from self.accept(literal)):
                return literal
        return None

    def spaces(self) -> Read[None]:
        """Takes whitespace."""
        while (yield from self.peek()).isspace():
            self._at += 1

    def until(self, markers: Sequence[str], emit: Emit) -> Read[str | None]:
        """Emits text up to the first of `markers`, takes that and returns it; None at the end.

        Of markers that begin at one place the longest is meant. Text is emitted as soon as it
        cannot be the beginning of a marker.
        """
        while True:
            text = yield from self.some()
            if not text:
                return None
            start, marker = _first_of(text, markers)
            held = _held(text, markers) if not self._final or (self._cut and self.sure) else 0
            certain = start if marker else len(text) - held
            if marker and not self._final and _may_grow(text[start:], marker, markers):
                marker = None
            if certain:
                emit(text[:certain])
                self._at += certain
            if marker:
                self._at += len(marker)
                return marker
            if self._final and held and not marker:
                self._at += held
            elif not certain and not self._final:
                yield


def _first_of(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return len(text), None
    at, _, marker = min(found)
    return at, marker


def _may_grow(text: str, marker: str, markers: Sequence[str]) -> bool:
    return any(
        len(other) > len(marker) and other.startswith(text) and other != text for other in markers
    )


def _held(text: str, markers: Sequence[str]) -> int:
    """Length of the end of `text` that a marker may begin with."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
