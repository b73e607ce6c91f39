"""Building a grammar in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from localllm.text.grammars import literal_pattern
from localllm.text.tokenizer import Tokenizer

TEXT = "/(?s:.*)/"

# As templates write JSON, which is what the models have seen. Keywords that cannot be enforced are
# passed over: what tools say of their arguments is advice, as it is to other servers.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": True,
}


class Words:
    """How a vocabulary writes text: control tokens have to be asked for by their number."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = {
            text: number
            for text, number in tokenizer.special_tokens.items()
            if text and not tokenizer.token_bytes(number)
        }
        self._ends = tokenizer.eog_ids
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    def parts(self, text: str) -> list[int | str]:
        """Control tokens by number, and the texts between them."""
        parts: list[int | str] = []
        at = 0
        for match in self._any.finditer(text) if self._any else ():
            parts += [text[at : match.start()], self._ids[match.group()]]
            at = match.end()
        parts.append(text[at:])
        return [part for part in parts if part != ""]

    def literal(self, text: str, *, loose: bool = False) -> str:
        """An expression for exactly this text. A token that ends the generation ends it here.

        `loose`: its line breaks may be missing, or be two.
        """
        expressions = []
        for part in self.parts(text):
            if isinstance(part, str):
                expressions.append(_loose(part) if loose and "\n" in part else quoted(part))
            elif part in self._ends:
                break
            else:
                expressions.append(token(part))
        return " ".join(expressions)

    def text_of(self, number: int) -> str:
        return next(text for text, known in self._ids.items() if known == number)

    def any_but(self, tokens: Iterable[int]) -> str:
        """An expression for any one token but these and those that end a generation."""
        return f"<[^{','.join(map(str, sorted({*tokens, *self._ends})))}]>"


class Rules:
    """A grammar that grows. Names are made up as needed."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._rules: list[str] = []
        self._schemas: dict[str, str] = {}

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, expression: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def recursive(self, expression: Callable[[str], str]) -> str:
        """A rule whose expression may have its own name in it."""
        name = self.rule("")
        self._rules[int(name[1:])] = f"{name}: {expression(name)}"
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
        if text not in self._schemas:
            self._schemas[text] = self.rule(f"%json {text}")
        return self._schemas[text]

    def text_until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        parts = self.words.parts(end)
        if len(parts) == 1 and isinstance(parts[0], str):
            return self.rule(TEXT, f"[suffix={quoted(end)}]")
        first = parts[0]
        before = f"/(?s:.*){literal_pattern(first)}/" if isinstance(first, str) else TEXT
        rest = end.removeprefix(first) if isinstance(first, str) else end
        return f"{self.rule(before)} {self.words.literal(rest)}"

    def in_order(self, members: list[tuple[str, bool]], separator: str) -> str:
        """Members with `separator` in between; those that are not required may be missing."""
        if not separator:
            return " ".join(e if required else f"({e})?" for e, required in members)
        first, later = "", ""
        for expression, required in reversed(members):
            new_first = f"{expression} {later}"
            new_later = f"{separator} {expression} {later}"
            if not required:
                new_first = f"{new_first} | {first}" if first else f"({new_first})?"
                new_later = f"({new_later}) | {later}" if later else f"({new_later})?"
            first, later = self.rule(new_first), self.rule(new_later)
        return first


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _loose(text: str) -> str:
    return "/" + literal_pattern(text).replace(r"\n", r"\n{0,2}") + "/"


def token(number: int) -> str:
    return f"<[{number}]>"
