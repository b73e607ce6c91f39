"""Keeps special tokens that users write apart from those that a template writes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from localllm.text.bound import translated

# Unicode sets these aside for a program's own use: they are no characters of any text.
_NOTHING, _FIRST, _LAST = 0xFDD0, 0xFDD1, 0xFDEF
STAND_INS = f"{chr(_NOTHING)}-{chr(_LAST)}"
"""The range, as it is written in a class of a regular expression."""

Exempt: TypeAlias = Sequence[tuple[str, str]]
"""Pairs of hidden and shown text."""

# Too common in text, names and JSON to be taken away, and never all that is special in a token.
_ORDINARY = set("_-./\\:;,'\"(){}=&%!?+*#@~$^`\u2581")


class Mask:
    """Writes the brackets of special tokens (`<`, `|`, `>`...) differently in text from users.

    A template that renders hidden text cannot make a special token out of it, whatever it cuts
    and joins: only its own brackets are brackets. After the rendered prompt was cut at its special
    tokens, `reveal` gives the text between them back.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        counts = Counter(c for token in tokens for c in set(token) if _is_bracket(c))
        brackets = [character for character, _ in counts.most_common(_LAST - _FIRST + 1)]
        self._stand_ins = {c: chr(_FIRST + index) for index, c in enumerate(brackets)}
        foreign = dict.fromkeys(range(_NOTHING, _LAST + 1), "\ufffd")
        self._hide = foreign | {ord(c): stand_in for c, stand_in in self._stand_ins.items()}
        self._reveal = {ord(stand_in): c for c, stand_in in self._stand_ins.items()}
        self._reveal[_NOTHING] = ""
        words = [token for token in tokens if not any(c in self._stand_ins for c in token)]
        self._words = re.compile("|".join(map(re.escape, words))) if words else None

    def hide(self, text: str, exempt: Exempt = ()) -> str:
        text = translated(text, self._hide)
        for hidden, shown in exempt:
            text = text.replace(hidden, shown)
        if self._words:  # special tokens without brackets are broken up
            text = self._words.sub(lambda m: f"{m[0][0]}{chr(_NOTHING)}{m[0][1:]}", text)
        return text

    def reveal(self, text: str) -> str:
        return translated(text, self._reveal)

    def exempt(self, texts: Iterable[str], tokens: Collection[str]) -> Exempt:
        """Those `texts` that may stay as they are in hidden text, for a template to find them.

        None is taken that could share characters with one of `tokens`.
        """
        bracketed = [text for text in texts if any(c in self._stand_ins for c in text)]
        if not bracketed:
            return ()
        heads = {token[:n] for token in tokens for n in range(1, len(token) + 1)}
        tails = {token[-n:] for token in tokens for n in range(1, len(token) + 1)}
        return tuple(
            (text.translate(self._hide), text)
            for text in bracketed
            if not _touches(text, heads, tails)
            and not any(text in token or token in text for token in tokens)
        )


def _touches(text: str, heads: Collection[str], tails: Collection[str]) -> bool:
    """Whether a token begins or ends within `text`, other than one right inside it."""
    return any(text[n:] in heads or text[: n + 1] in tails for n in range(len(text)))


def _is_bracket(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character in _ORDINARY)
