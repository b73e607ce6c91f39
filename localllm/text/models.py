"""What every kind of vocabulary provides to the tokenizer."""

from __future__ import annotations

import re
from typing import Protocol

from tokenizers import Tokenizer

SPACE = "\u2581"  # how vocabularies other than byte-level ones write a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_SHORT = 2048  # characters


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The library's token ids. It holds Python's lock while it encodes a text, but not a batch."""
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=False).ids
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


class TextModel(Protocol):
    """Turns text without special tokens into token ids."""

    def encode(self, text: str) -> list[int]:
        """`text` is valid Unicode and not empty; it stands at the start or after a special
        token."""
        ...

    def text_bytes(self, token: str) -> bytes:
        """What an ordinary token contributes to the text."""
        ...


def byte_of(token: str) -> bytes | None:
    """The byte that a token like `<0x0A>` stands for."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def spaced_text_bytes(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()
