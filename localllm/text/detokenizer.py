"""Token ids to text, as they come: shows what is certain and holds back the rest."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What of a `Tokenizer` is needed here."""

    def token_bytes(self, token: int, /) -> bytes: ...


class Detokenizer:
    """The text of one generation, which ends before the first stop string.

    Held back are only the bytes of an unfinished character and what may become a stop string.
    However the tokens are split over calls, the pieces joined are the text of all tokens
    (`Tokenizer.decode(ids, continuation=True)`) up to the stop string that begins first; of those
    that begin at the same place the shortest, which is complete first.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        free_tokens: int = 0,
        shielded: Callable[[], bool] | None = None,
    ) -> None:
        """Stop strings are looked for behind the first `free_tokens` tokens, and where what was
        shown last is not followed by text that is `shielded` from them."""
        if "" in stop:
            raise ValueError("a stop string is empty")
        self._free = free_tokens
        self._shielded = shielded if stop else None
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stops = sorted(stop, key=len)
        self._any_stop = re.compile("|".join(map(re.escape, self._stops))) if stop else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens; returns what can be shown now. Nothing after a stop string."""
        return "".join(self.pieces(ids))

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """What `push` returns, bit by bit, so that each may decide what is `shielded` next."""
        token_bytes = self._tokenizer.token_bytes
        if self._free > 0:
            ids = list(ids)
            yield self._decoder.decode(b"".join(map(token_bytes, ids[: self._free])))
            ids, self._free = ids[self._free :], self._free - len(ids)
        text = self._decoder.decode(b"".join(map(token_bytes, ids)))
        if self._shielded is None:
            yield self._show(text, final=False)
            return
        for character in text:
            if self.stopped_by is None and self._shielded():
                yield self._held + character
                self._held = ""
            else:
                yield self._show(character, final=False)

    def finish(self) -> str:
        """No more tokens come: returns what was held back."""
        return self._show(self._decoder.decode(b"", final=True), final=True)

    def _show(self, text: str, *, final: bool) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        possible = len(text) if final else self._first_possible_stop(text)
        match = self._any_stop.search(text) if self._any_stop else None
        if match and match.start() <= possible:
            self.stopped_by = match.group()
            self._held = ""
            return text[: match.start()]
        self._held = text[possible:]
        return text[:possible]

    def _first_possible_stop(self, text: str) -> int:
        """Where the end of `text` begins that may grow into a stop string; its length if none."""
        if not self._stops:
            return len(text)
        longest = len(self._stops[-1])
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
