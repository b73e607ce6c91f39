"""Tokens with their log-probabilities beside the text that they make, which may come later."""

from __future__ import annotations

import codecs
from collections import deque
from typing import NamedTuple

from localllm.engine.messages import TokenLogprobs
from localllm.text.detokenizer import TokenBytes


class ShownToken(NamedTuple):
    """`offset` is where its text begins, in characters of the answer's text; the `is_end` token is
    the one that ended the generation, and no part of the text."""

    logprobs: TokenLogprobs
    offset: int
    is_end: bool


class ShownTokens:
    """Holds tokens back until the text in which they begin has been shown. Of a text that a stop
    string cuts, the tokens that begin behind the cut are never shown."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = 0
        self._shown_text = 0
        self._held: deque[ShownToken] = deque()

    def add(self, logprobs: TokenLogprobs, *, is_end: bool) -> None:
        self._held.append(ShownToken(logprobs, self._decoded, is_end))
        if not is_end:
            data = self._tokenizer.token_bytes(logprobs.token)
            self._decoded += len(self._decoder.decode(data))

    def show(self, text: str, *, all_others: bool) -> tuple[ShownToken, ...]:
        """The tokens that begin in the text shown so far, `text` being the last of it."""
        self._shown_text += len(text)
        shown = []
        while self._held and (all_others or self._held[0].offset < self._shown_text):
            shown.append(self._held.popleft())
        return tuple(shown)
