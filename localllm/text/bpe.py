"""Byte-pair encoding: GPT-2's byte-level kind, and Gemma 4's on characters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from localllm.errors import TokenizerError
from localllm.text.models import SPACE, library_ids, spaced_text_bytes
from localllm.text.pre_tokenizers import PreTokenizer
from localllm.text.vocabulary import TokenType, Vocabulary

log = logging.getLogger(__name__)

_MERGES = "tokenizer.ggml.merges"
_NEWLINES = re.compile(r"(\n+)")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: those printable in Latin-1, then U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF = _byte_alphabet()


class BPEModel:
    """A vocabulary with a list of merges, best first."""

    def __init__(self, vocabulary: Vocabulary, merges: list[str], rules: PreTokenizer) -> None:
        # Without the special tokens: no merge may make one out of plain text.
        ids = {
            token: index
            for index, (token, kind) in enumerate(
                zip(vocabulary.tokens, vocabulary.types, strict=True)
            )
            if kind not in (TokenType.CONTROL, TokenType.UNKNOWN)
        }
        self._rules = rules
        self._newlines = (
            {token: index for token, index in ids.items() if not token.strip("\n")}
            if rules.whole_newlines
            else {}
        )
        self._tokenizer = Tokenizer(_build(ids, _parse(merges), rules))
        self._tokenizer.pre_tokenizer = build_pre_tokenizer(rules)

    def encode(self, text: str) -> list[int]:
        if self._rules.escape_spaces:
            text = text.replace(" ", SPACE)
        if not self._newlines:
            return self._merge(text)
        return [token for part in _NEWLINES.split(text) if part for token in self._line(part)]

    def text_bytes(self, token: str) -> bytes:
        if not self._rules.byte_level:
            return spaced_text_bytes(token)
        try:
            return bytes(map(BYTE_OF.__getitem__, token))
        except KeyError:  # not written in the byte alphabet: an added token marked as normal
            return token.encode()

    def _line(self, text: str) -> list[int]:
        """`text` is a run of newlines or has none."""
        return [self._newlines[text]] if text in self._newlines else self._merge(text)

    def _merge(self, text: str) -> list[int]:
        return library_ids(self._tokenizer, text)


def _parse(merges: list[str]) -> list[tuple[str, str]]:
    """Each is two tokens with a space between; the first may begin with a space itself."""
    pairs = []
    for index, merge in enumerate(merges):
        space = merge.find(" ", 1)
        if space < 0 or space == len(merge) - 1:
            raise TokenizerError(f"{_MERGES}: {merge!r} at {index} is not a pair of tokens")
        pairs.append((merge[:space], merge[space + 1 :]))
    return pairs


def _build(ids: dict[str, int], merges: list[tuple[str, str]], rules: PreTokenizer) -> BPE:
    options = {"ignore_merges": rules.ignore_merges, "byte_fallback": not rules.byte_level}
    try:
        return BPE(ids, merges, **options)
    except Exception:  # the library's own: a merge with or into something that is no token
        known = list(_known_merges(ids, merges))
        log.warning(
            "%s: %d merges are left out, as they make no token", _MERGES, len(merges) - len(known)
        )
    try:
        return BPE(ids, known, **options)
    except Exception as error:
        raise TokenizerError(f"{_MERGES}: {error}") from error


def _known_merges(ids: dict[str, int], merges: list[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for left, right in merges:
        if left in ids and right in ids and left + right in ids:
            yield left, right


def build_pre_tokenizer(rules: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """What cuts text into words by these rules."""
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    if rules.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
