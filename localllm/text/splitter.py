"""Finding special tokens in text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from localllm.text.bound import PIECE

_HEAD = 2
_SPACES = " \t\n\v\f\r"
_NOT_SPACE = re.compile(f"[^{_SPACES}]")


class SpecialTokenSplitter:
    """Cuts a text at the special tokens in it: the leftmost first, of several there the longest.

    Vocabularies have up to thousands of them (`<unused0>`...), so a regular expression finds only
    the few different beginnings, and dictionaries the token.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        strips_left: Collection[int] = (),
        strips_right: Collection[int] = (),
    ) -> None:
        self._ids = ids
        self._strips_left = strips_left
        self._strips_right = strips_right
        self._lengths: dict[str, list[int]] = {}
        for text in ids:
            self._lengths.setdefault(text[:_HEAD], []).append(len(text))
        for head, lengths in self._lengths.items():
            lengths.extend(self._lengths.get(head[: _HEAD - 1], []))
            self._lengths[head] = sorted(set(lengths), reverse=True)
        heads = sorted(self._lengths, key=len, reverse=True)
        self._heads = re.compile("|".join(map(re.escape, heads))) if heads else None

    def split(self, text: str) -> Iterator[int | str]:
        """Yields token ids and the non-empty text between them, in order."""
        start = 0
        for begin, end, token in self._matches(text):
            if begin < start:
                continue  # within spaces that the token before has swallowed
            between = text[start:begin]
            if token in self._strips_left:
                between = between.rstrip(_SPACES)
            if between:
                yield between
            yield token
            start = end
            if token in self._strips_right:
                start = _end_of_spaces(text, end)
        if start < len(text):
            yield text[start:]

    def _matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        if self._heads is None:
            return
        position = 0
        while head := self._next_head(self._heads, text, position):
            begin = head.start()
            position = begin + 1
            for length in self._lengths[head.group()]:
                piece = text[begin : begin + length]
                if piece in self._ids:
                    position = begin + len(piece)
                    yield begin, position, self._ids[piece]
                    break

    @staticmethod
    def _next_head(heads: re.Pattern[str], text: str, position: int) -> re.Match[str] | None:
        """The first beginning from `position` on. Other threads can run between the windows that
        are searched, which overlap, since beginnings have up to two characters."""
        end = position + PIECE
        while end < len(text):
            if head := heads.search(text, position, end):
                return heads.search(text, head.start())  # it may be a longer one at the edge
            position = end - _HEAD + 1
            end = position + PIECE
        return heads.search(text, position)


def _end_of_spaces(text: str, start: int) -> int:
    match = _NOT_SPACE.search(text, start)
    return match.start() if match else len(text)
