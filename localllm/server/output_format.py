"""How to read what a model writes in answer to one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from localllm.text.detokenizer import TokenBytes
from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools.formats import AnyFormat
from localllm.text.tools.parser import OutputParser
from localllm.text.tools.schema import Tool


@dataclass(frozen=True)
class OutputFormat:
    """By default all of it is content."""

    format: AnyFormat | None = None
    tools: tuple[Tool, ...] = ()
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = Thinking.POSSIBLE
    required: bool = False  # all but the thinking is calls

    def parser(self) -> OutputParser:
        """For one answer."""
        return OutputParser(
            self.format, self.tools, self.reasoning, self.thinking, required=self.required
        )

    def tokens(self, tokenizer: Tokenizer) -> TokenBytes:
        """The vocabulary with the control tokens of this format in sight, for the parser."""
        markers = self.format.markers if self.format else ()
        if self.reasoning:
            markers += (self.reasoning.opens, self.reasoning.closes)
        texts = _control_texts(tokenizer, markers)
        return _InSight(tokenizer, texts) if texts else tokenizer


@lru_cache(256)
def _control_texts(tokenizer: Tokenizer, markers: tuple[str, ...]) -> Mapping[int, bytes]:
    """Control tokens that markers are made of, without those that end a generation."""
    return {
        token: text.encode()
        for text, token in tokenizer.special_tokens.items()
        if text
        and not tokenizer.token_bytes(token)
        and token not in tokenizer.eog_ids
        and any(text in marker for marker in markers)
    }


class _InSight:
    def __init__(self, tokenizer: Tokenizer, texts: Mapping[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts

    def token_bytes(self, token: int) -> bytes:
        return self._texts.get(token) or self._tokenizer.token_bytes(token)
