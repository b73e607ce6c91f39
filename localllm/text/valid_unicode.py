"""Text that can be encoded."""

from __future__ import annotations


def valid_unicode(text: str) -> str:
    """JSON can carry half of a surrogate pair, which no tokenizer takes: U+FFFD instead."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
