"""Which tokens a sequence may not draw: grammar, forbidden texts, least length, end of thinking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from localllm.backends.base import Int32Array, MaskArray, mask_words
from localllm.engine.grammars import GrammarState, TextWatch
from localllm.engine.messages import Submit
from localllm.engine.vocabulary import Vocabulary
from localllm.grammar import ThinkingBudget

_ALL = 0xFFFFFFFF


class Restriction:
    """Of one sequence: `take` its tokens in order, `fill` a mask for the next where `active`."""

    def __init__(
        self, request: Submit, vocabulary: Vocabulary, grammar: GrammarState | None
    ) -> None:
        params = request.params
        self.error: str | None = None  # why no token can come
        self._grammar = grammar
        self._forbidden = ForbiddenTexts(vocabulary, params.bad_words) if params.bad_words else None
        budget = params.thinking_budget
        self._thinking = Thinking(vocabulary, budget) if budget else None
        self._ends = bits_of(request.eos_ids, vocabulary.size)
        self._stops = bits_of(params.stop_token_ids, vocabulary.size)
        self._ignores_eos = params.ignore_eos
        self._to_come = params.min_tokens  # tokens before it may end

    @property
    def active(self) -> bool:
        return (
            self._grammar is not None
            or self._forbidden is not None
            or self._to_come > 0
            or (self._thinking is not None and self._thinking.forced is not None)
        )

    @property
    def ended(self) -> bool:
        """The output is complete: nothing may follow."""
        return self._grammar is not None and self._grammar.ended

    def take(self, token: int) -> None:
        self._to_come -= 1
        if self._grammar is not None:
            self._grammar.take(token)
            self.error = self._grammar.error
        if self._forbidden is not None:
            self._forbidden.take(token)
        if self._thinking is not None:
            self._thinking.take(token)

    def fill(self, row: MaskArray) -> None:
        """A row of all zeros means that there is an `error`."""
        if self._thinking is not None and self._thinking.forced is not None:
            row.fill(0)
            set_bits(row, bits_of([self._thinking.forced], len(row) * 32))
            return
        grammar = self._grammar
        if grammar is not None and grammar.begun:
            grammar.fill(row)
            self.error = grammar.error
            if self.error is not None:
                row.fill(0)
                return
            if len(self._stops[0]) and not grammar.may_end:
                clear_bits(row, self._stops)
        else:
            row.fill(_ALL)
        if self._forbidden is not None:
            self._forbidden.clear(row)
        if not row.any():
            self.error = "grammar, bad_words and stop_token_ids leave no token"
        elif self._must_go_on:
            self._clear_ends(row)

    @property
    def _must_go_on(self) -> bool:
        waits = self._grammar is not None and not self._grammar.begun
        with_grammar = self._grammar is not None and self._ignores_eos
        return self._to_come > 0 or waits or with_grammar

    def _clear_ends(self, row: MaskArray) -> None:
        """Unless nothing else is left: then the grammar has come to its end."""
        cleared = []
        ends = () if self._ignores_eos and self._grammar is None else (self._ends,)
        for words, values in (*ends, self._stops):
            held = row[words] & values
            if held.any():
                row[words] ^= held
                cleared.append((words, held))
        if cleared and not row.any():
            for bits in cleared:
                set_bits(row, bits)


class ForbiddenTexts:
    """No text of `texts` comes up in the output, however it is cut into tokens."""

    def __init__(self, vocabulary: Vocabulary, texts: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        words = [text.encode() for text in texts]
        size = vocabulary.size
        self._always = _union([bits_of(vocabulary.containing(word), size) for word in words])
        # By a beginning that the output may end with: the tokens that would complete the rest.
        self._completing: dict[bytes, list[Bits]] = {}
        for word in words:
            for cut in range(1, len(word)):
                ids = vocabulary.starting_with(word[cut:])
                if len(ids):
                    self._completing.setdefault(word[:cut], []).append(bits_of(ids, size))
        self._longest = max(map(len, words))
        self._tail = b""

    def take(self, token: int) -> None:
        data = self._tail + self._vocabulary.token_bytes[token]
        self._tail = data[max(0, len(data) - self._longest + 1) :]

    def clear(self, row: MaskArray) -> None:
        clear_bits(row, self._always)
        for start in range(len(self._tail)):
            for bits in self._completing.get(self._tail[start:], ()):
                clear_bits(row, bits)


class Thinking:
    """Counts the tokens of thinking, and forces its end when there are too many."""

    def __init__(self, vocabulary: Vocabulary, budget: ThinkingBudget) -> None:
        self._watch: TextWatch | None = TextWatch(vocabulary, budget.end)
        self._left = budget.max_tokens
        self._rest = list(budget.forced)

    @property
    def forced(self) -> int | None:
        """The only token that may come now."""
        return self._rest[0] if self._watch and self._left <= 0 and self._rest else None

    def take(self, token: int) -> None:
        if self._watch is None:
            return
        if self._left <= 0 and self._rest:
            self._rest.pop(0)
        self._left -= 1
        if self._watch.take(token) is not None:
            self._watch = None


Bits = tuple[Int32Array, MaskArray]
"""Words of a mask that have bits of a set of tokens, and these bits."""


def bits_of(tokens: Iterable[int], size: int) -> Bits:
    ids = np.array(sorted({int(t) for t in tokens if 0 <= t < size}), np.int64)
    row = np.zeros(mask_words(size), np.uint32)
    np.bitwise_or.at(row, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    words = np.flatnonzero(row).astype(np.int32)
    return words, row[words]


def clear_bits(row: MaskArray, bits: Bits) -> None:
    words, values = bits
    row[words] &= ~values


def set_bits(row: MaskArray, bits: Bits) -> None:
    words, values = bits
    row[words] |= values


def _union(all_bits: Sequence[Bits]) -> Bits:
    words = np.concatenate([words for words, _ in all_bits])
    values = np.concatenate([values for _, values in all_bits])
    row = np.zeros(int(words.max(initial=-1)) + 1, np.uint32)
    np.bitwise_or.at(row, words, values)
    found = np.flatnonzero(row).astype(np.int32)
    return found, row[found]
