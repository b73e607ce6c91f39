"""The model's words as the engine needs them for grammars and forbidden texts.

Read when first asked for, since most requests need none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from localllm.backends.base import Int32Array
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # takes a while to import
    from llguidance import LLTokenizer, TokenizerWrapper


class Vocabulary:
    """`size` is the number of logits, which may be more than there are tokens.

    Bytes of a token are what it adds to the text; control tokens add none.
    """

    def __init__(self, load: Callable[[], Tokenizer], size: int) -> None:
        self._load = load
        self.size = size

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        known = min(self._tokenizer.vocab_size, self.size)
        return [self._tokenizer.token_bytes(i) for i in range(known)] + [b""] * (self.size - known)

    def visible_bytes(self, token: int) -> bytes:
        """As above, but control tokens as they are written."""
        data = self.token_bytes[token]
        if data or token >= self._tokenizer.vocab_size:
            return data
        return self._tokenizer.token_text(token).encode()

    def containing(self, text: bytes) -> Int32Array:
        """The tokens that have `text` in them."""
        found = [i for i, data in enumerate(self.token_bytes) if text in data]
        return np.array(found, np.int32)

    def starting_with(self, text: bytes) -> Int32Array:
        ids, sorted_bytes = self._sorted
        first = bisect_left(sorted_bytes, text)
        end = first
        while end < len(sorted_bytes) and sorted_bytes[end].startswith(text):
            end += 1
        return ids[first:end]

    @cached_property
    def _sorted(self) -> tuple[Int32Array, list[bytes]]:
        order = sorted(range(self.size), key=self.token_bytes.__getitem__)
        return np.array(order, np.int32), [self.token_bytes[i] for i in order]

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = sorted(i for i in self._tokenizer.eog_ids if i < self.size)
        words = cast("TokenizerWrapper", _Words(self, ends))
        return LLTokenizer(words, n_vocab=self.size, eos_token=ends or None)

    def tokens_of(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


class _Words:
    """A vocabulary as `LLTokenizer` reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, ends: list[int]) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = ends[0] if ends else 0
        size = vocabulary.size
        # what adds nothing to the text can only be asked for by name
        self.special_token_ids = [i for i in range(size) if not vocabulary.token_bytes[i]]
        self.tokens = [
            vocabulary.token_bytes[i] or vocabulary.visible_bytes(i) or b"<|none-%d|>" % i
            for i in range(size)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._vocabulary.tokens_of(text)
