"""Grammars at work: which tokens may come next, as llguidance says."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from localllm.backends.base import MaskArray
from localllm.engine.vocabulary import Vocabulary
from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammars import compilable, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_KEPT = 64


class GrammarCompiler:
    """Keeps what it compiled last. Used by one thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """At the start of the grammar; RequestError if it has no such."""
        key = (spec.kind, spec.source)
        if key not in self._compiled:
            self._compiled[key] = self._compile(spec)
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key].deep_copy()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._vocabulary.for_grammars
        matcher = LLMatcher(tokenizer, compilable(spec), log_level=0, limits=parser_limits())
        # The first mask takes longest, and copies have it too.
        first = _first_token(matcher)
        if first is None or matcher.is_error():
            raise _failure(matcher)
        # What is too large for the parser shows once there is something to parse.
        probe = matcher.deep_copy()
        if probe.consume_token(first) and not probe.is_stopped():
            probe.compute_bitmask()
        if probe.is_error():
            raise _failure(probe)
        return matcher


def _first_token(matcher: LLMatcher) -> int | None:
    """The first that may come, in the order of the vocabulary."""
    if matcher.is_error():
        return None
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    byte = int((mask != 0).argmax()) if len(mask) else 0
    if not mask[byte : byte + 1].any():
        return None
    return byte * 8 + int(np.unpackbits(mask[byte : byte + 1], bitorder="little").argmax())


def _failure(matcher: LLMatcher) -> RequestError:
    problem = " ".join(matcher.get_error().split())
    if not problem or problem.startswith("NoExtension"):
        problem = "no tokens of this model satisfy it"
    return RequestError(f"grammar: {problem}", param="grammar", code="invalid_grammar")


class GrammarState:
    """A sequence's place in its grammar, which begins once one of the texts `after` has come."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, after: tuple[str, ...]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._before = TextWatch(vocabulary, after) if after else None

    @property
    def begun(self) -> bool:
        return self._before is None

    @property
    def may_end(self) -> bool:
        return self.begun and self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Nothing can follow."""
        return self.begun and self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        if not self._matcher.is_error():
            return None
        return f"the grammar failed: {' '.join(self._matcher.get_error().split())}"

    def take(self, token: int) -> None:
        if self._before is None:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        elif (rest := self._before.take(token)) is not None:
            self._before = None
            if rest.strip():  # the token had the beginning of the answer in it
                self._matcher.consume_tokens(self._vocabulary.for_grammars.tokenize_bytes(rest))

    def fill(self, row: MaskArray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


class TextWatch:
    """Finds the first of some texts in a growing output, control tokens as they are written."""

    def __init__(self, vocabulary: Vocabulary, texts: tuple[str, ...]) -> None:
        self._vocabulary = vocabulary
        self._texts = [text.encode() for text in texts]
        self._longest = max(map(len, self._texts))
        self._tail = b""

    def take(self, token: int) -> bytes | None:
        """What of the token stands behind the text that it completes; None if it does not."""
        data = self._tail + self._vocabulary.visible_bytes(token)
        ends = [at + len(text) for text in self._texts if (at := data.find(text)) >= 0]
        self._tail = data[max(0, len(data) - self._longest + 1) :]
        return data[min(ends) :] if ends else None
