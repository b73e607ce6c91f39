"""Small vocabularies, written to model files that hold nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localllm.text.bpe import BYTE_OF
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer, load_tokenizer
from localllm.text.vocabulary import TokenType
from tests.helpers import tokenizer_cases

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (
    TokenType.NORMAL,
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.USER_DEFINED,
    TokenType.BYTE,
)


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of the reference vocabularies, loaded once."""
    (case,) = tokenizer_cases(name)
    return load_tokenizer(case.gguf)


@cache
def published(path: Path) -> ChatTemplate:
    """One of the reference templates, with Phi-3's vocabulary, compiled once."""
    return ChatTemplate({"default": path.read_text()}, tokenizer("phi-3"))


def write_vocabulary(path: Path, keys: Mapping[str, Any]) -> Path:
    """Keys without the leading `tokenizer.ggml.`, unless they have a dot. None leaves a key out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_int32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(
    special: Mapping[str, TokenType] | None = None,
    words: Sequence[str] = (),
    merges: Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """Keys of a byte-level vocabulary: 256 bytes, then words, then special tokens."""
    special = special or {}
    tokens = [*BYTE_OF, *words, *special]
    types = [NORMAL] * (256 + len(words)) + list(special.values())
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": list(merges) or ["a b"],
        **keys,
    }


def sentence_pieces(
    special: Mapping[str, TokenType] | None = None, words: Sequence[str] = (), **keys: Any
) -> dict[str, Any]:
    """Keys of a SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, words, special tokens."""
    special = special or {}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *special.values()]
    scores = -np.arange(len(tokens), dtype=np.float32)
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "scores": scores.tolist(),
        **keys,
    }
