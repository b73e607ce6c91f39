"""Text to token ids and back, for every kind of vocabulary that GGUF files carry.

Agrees with llama.cpp's tokenizers, with two exceptions made on purpose: a prompt never starts with
two BOS, and `</s>` ends a generation only where it can be a control token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from localllm.errors import GGUFError, RequestError, TokenizerError
from localllm.gguf import GGUFFile
from localllm.text.bound import TextBound
from localllm.text.models import TextModel, byte_of
from localllm.text.splitter import SpecialTokenSplitter
from localllm.text.valid_unicode import valid_unicode
from localllm.text.vocabulary import TokenType, Vocabulary

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Token ids with a meaning. `before` and `after` are what a whole prompt is wrapped in."""

    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    end_of_generation: frozenset[int]
    before: int | None
    after: int | None
    shown_controls: frozenset[int] = frozenset()
    strips_left: frozenset[int] = frozenset()
    strips_right: frozenset[int] = frozenset()


class Tokenizer:
    """Made by `load_tokenizer`. Safe to use from several threads."""

    def __init__(
        self, vocabulary: Vocabulary, model: TextModel, ids: SpecialIds, *, spaced_start: bool
    ) -> None:
        """`spaced_start`: encoding puts a space before a text, so decoding takes it away."""
        self._vocabulary = vocabulary
        self._model = model
        self._ids = ids
        self._spaced_start = spaced_start
        self._bytes: list[bytes | None] = [None] * len(vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self._ids.bos

    @property
    def eos_id(self) -> int | None:
        return self._ids.eos

    @property
    def unk_id(self) -> int | None:
        return self._ids.unk

    @property
    def pad_id(self) -> int | None:
        return self._ids.pad

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return self._ids.end_of_generation

    @property
    def add_bos(self) -> bool:
        """Whether a prompt starts with BOS."""
        return self._ids.before is not None

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Control, unknown and user-defined tokens by their text."""
        return self._texts(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        bound: TextBound | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        `add_special`: with the BOS (and EOS) that the model wants, unless the text has it.
        `parse_special`: control tokens written in the text become those tokens; otherwise they
        are text. User-defined tokens are found in either case. A text that `bound` refuses raises
        its RequestError.
        """
        splitter = self._special_splitter if parse_special else self._user_splitter

        def encode(text: str) -> list[int]:
            return self.encode_parts(splitter.split(text))

        if bound is not None:
            bound.check(text, encode)
        ids = encode(text)
        return self.wrap(ids) if add_special else ids

    def encode_parts(self, parts: Iterable[int | str]) -> list[int]:
        """Token ids of plain texts and special tokens in a row; none is looked for in the texts."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += self._model.encode(valid_unicode(part))
            else:
                ids.append(part)
        return ids

    def wrap(self, ids: list[int]) -> list[int]:
        """Adds BOS (and EOS) as the model wants them, where `ids` has none."""
        before, after = self._ids.before, self._ids.after
        if before is not None and ids[:1] != [before]:
            ids = [before, *ids]
        if after is not None and (ids[-1:] != [after] or len(ids) == 1):
            ids = [*ids, after]
        return ids

    def splitter(self, tokens: Mapping[str, int]) -> SpecialTokenSplitter:
        """Finds these tokens in text, with the spaces that this model drops beside them."""
        return SpecialTokenSplitter(tokens, self._ids.strips_left, self._ids.strips_right)

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, continuation: bool = False
    ) -> str:
        """The text of a sequence. Bytes that are not UTF-8 become U+FFFD.

        SentencePiece models put a space before each text that they encode. Decoding takes it away
        again, so that `decode(encode(text)) == text`. What a model generates continues the prompt:
        there the first space is text, and `continuation` keeps it, as `Detokenizer` does.
        """
        data = b"".join(map(self.token_bytes if skip_special else self._all_bytes, ids))
        if self._spaced_start and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What a token contributes to the text; nothing for control tokens."""
        self._check(token)
        data = self._bytes[token]
        if data is None:
            data = self._bytes[token] = self._make_bytes(token)
        return data

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        self._check(token)
        return self._vocabulary.tokens[token]

    def is_control(self, token: int) -> bool:
        self._check(token)
        return self._vocabulary.types[token] == TokenType.CONTROL

    def is_user_defined(self, token: int) -> bool:
        self._check(token)
        return self._vocabulary.types[token] == TokenType.USER_DEFINED

    def _check(self, token: int) -> None:
        if not 0 <= token < len(self._vocabulary):
            raise RequestError(
                f"{token} is not one of {len(self._vocabulary)} token ids", param="tokens"
            )

    def _all_bytes(self, token: int) -> bytes:
        """As `token_bytes`, with control and unknown tokens as they are written."""
        self._check(token)
        if self._vocabulary.types[token] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return self._vocabulary.tokens[token].encode()
        return self.token_bytes(token)

    def _make_bytes(self, token: int) -> bytes:
        text, kind = self._vocabulary.tokens[token], self._vocabulary.types[token]
        if token in self._ids.shown_controls or kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind in _HIDDEN:
            return b""
        if kind == TokenType.BYTE and (byte := byte_of(text)):
            return byte
        return self._model.text_bytes(text)

    def _texts(self, *types: TokenType) -> dict[str, int]:
        return {self._vocabulary.tokens[i]: i for i in self._vocabulary.ids_of_type(*types)}

    @cached_property
    def _special_splitter(self) -> SpecialTokenSplitter:
        return self.splitter(self.special_tokens)

    @cached_property
    def _user_splitter(self) -> SpecialTokenSplitter:
        return self.splitter(self._texts(TokenType.USER_DEFINED))


def load_tokenizer(source: str | Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a model file; TokenizerError naming the key for one that is broken."""
    from localllm.text.loading import build_tokenizer

    if not isinstance(source, GGUFFile):
        with GGUFFile.open(source) as file:
            return load_tokenizer(file)
    try:
        return build_tokenizer(source)
    except GGUFError as error:
        raise TokenizerError(str(error)) from error
