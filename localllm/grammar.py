"""What a grammar is, from the request that asks for it to the engine that enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from localllm.errors import RequestError

GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


@dataclass(frozen=True)
class GrammarSpec:
    """The output has to match `source`, and ends when nothing can follow.

    `source` is a JSON schema as JSON text, "" for `json_object`, a regular expression (Rust's
    syntax) that has to match as a whole, a JSON list of texts for `choice`, or a grammar in
    llguidance's dialect of Lark or in llama.cpp's GBNF.

    With `after` the output is free until one of these texts has been generated, tokens of their
    own included ("</think>"), and the grammar holds from the next token on. If none ever comes,
    nothing is enforced.
    """

    kind: GrammarKind
    source: str = ""
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(f"grammar: unknown kind {self.kind!r}", param="grammar")
        object.__setattr__(self, "after", tuple(self.after))
        if not all(isinstance(text, str) and text for text in self.after):
            raise RequestError("grammar: `after` must be texts, not empty", param="grammar")


@dataclass(frozen=True)
class ThinkingBudget:
    """Output that has not brought one of the texts `end` within `max_tokens` tokens goes on with
    the tokens `forced` (which should spell one), whatever the model would rather say."""

    max_tokens: int
    end: tuple[str, ...]
    forced: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise RequestError(
                f"the thinking budget must be 0 or more, not {self.max_tokens}",
                param="thinking_budget",
            )
        if not self.forced or not self.end:
            raise RequestError(
                "a thinking budget needs a text and tokens that end the thinking",
                param="thinking_budget",
            )
