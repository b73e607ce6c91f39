"""The vocabulary of a model file: tokens, their kinds, and the ids with a meaning of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.errors import TokenizerError
from localllm.gguf import GGUFFile

_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_SCORES = "tokenizer.ggml.scores"
_NO_TOKEN = 0xFFFFFFFF  # how converters write -1, "there is none", as an unsigned integer


class TokenType(IntEnum):
    """Kinds of tokens, by the number that files carry."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Vocabulary:
    """Tokens as the file has them, checked; index is the token id.

    `types` holds a `TokenType` a token. `scores` is None where the file has none.
    """

    tokens: list[str]
    types: bytearray
    scores: npt.NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.tokens)

    def ids_of_type(self, *types: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Reads tokens, types and scores; TokenizerError naming the key that is wrong."""
    tokens = file.get_strings(_TOKENS)
    if not tokens:
        raise TokenizerError(f"{_TOKENS}: the vocabulary is empty")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{_TOKENS}: {_first_duplicate(tokens)!r} occurs twice")
    return Vocabulary(tokens, _read_types(file, len(tokens)), _read_scores(file, len(tokens)))


def read_token_id(file: GGUFFile, key: str, size: int, default: int | None = None) -> int | None:
    """The token id under `key`. A default that the vocabulary is too small for means none."""
    value = file.get_int(key, None)
    if value is None:
        return default if default is not None and default < size else None
    if value in (-1, _NO_TOKEN):
        return None
    if not 0 <= value < size:
        raise TokenizerError(f"{key}: {value} is not one of {size} token ids")
    return value


def _read_types(file: GGUFFile, size: int) -> bytearray:
    types = _read_numbers(file, _TYPES, size)
    if types is None:
        return bytearray([TokenType.NORMAL]) * size
    if types.dtype.kind not in "iu":
        raise TokenizerError(f"{_TYPES}: not integers")
    wrong = (types < 0) | (types > max(TokenType))
    if wrong.any():
        raise TokenizerError(f"{_TYPES}: {types[wrong.argmax()]} is not a type of token")
    return bytearray(types.astype(np.uint8).tobytes())


def _read_scores(file: GGUFFile, size: int) -> npt.NDArray[np.float32] | None:
    scores = _read_numbers(file, _SCORES, size)
    if scores is None:
        return None
    wrong = np.isnan(scores)
    if wrong.any():
        raise TokenizerError(f"{_SCORES}: the score at {wrong.argmax()} is not a number")
    return np.asarray(scores, np.float32)


def _read_numbers(file: GGUFFile, key: str, size: int) -> npt.NDArray[Any] | None:
    """The first `size` numbers of an array; llama.cpp too takes arrays that are longer."""
    numbers = file.get_array(key, None)
    if numbers is None:
        return None
    if len(numbers) < size:
        raise TokenizerError(f"{key}: {len(numbers)} values for {size} tokens")
    return numbers[:size]


def _first_duplicate(tokens: list[str]) -> str:
    return next(token for token, count in Counter(tokens).items() if count > 1)
