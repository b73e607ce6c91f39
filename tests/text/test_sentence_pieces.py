"""A model rebuilt from a file's tokens and scores does what the original did."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from localllm.errors import TokenizerError
from localllm.text.sentence_pieces import check_charsmap
from localllm.text.tokenizer import load_tokenizer
from tests.text.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, write_vocabulary

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "how vexingly quick daft zebras jump",
    "\u00fcber die br\u00fccke, \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439",
] * 5
TEXTS = [
    "the quick fox",
    "  two  spaces   ",
    "unknown: \u4f60\u597d \U0001f999",
    "\uff26\uff55\uff4c\uff4c width \u2460 \ufb01ve",
    "tab\tand\nline",
    "a",
    "zebra's 100%",
]


def train(**options: Any) -> SentencePieceProcessor:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def keys_of(processor: SentencePieceProcessor, model: str, **keys: Any) -> dict[str, Any]:
    size = processor.get_piece_size()

    def kind(index: int) -> int:
        if processor.is_unknown(index):
            return int(UNKNOWN)
        if processor.is_control(index):
            return int(CONTROL)
        return int(BYTE if processor.is_byte(index) else NORMAL)

    return {
        "model": model,
        "tokens": [processor.id_to_piece(index) for index in range(size)],
        "scores": np.array([processor.get_score(i) for i in range(size)], np.float32).tolist(),
        "token_type": [kind(index) for index in range(size)],
        "unknown_token_id": processor.unk_id(),
        **keys,
    }


def test_merges_by_score_with_bytes(tmp_path: Path) -> None:
    original = train(
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    path = write_vocabulary(tmp_path / "v.gguf", keys_of(original, "llama"))
    subject = load_tokenizer(path)
    for text in TEXTS:
        ids = original.encode(text)
        assert subject.encode(text, add_special=False) == ids
        assert subject.decode(ids) == text


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_most_likely_segmentation(tmp_path: Path, rule: str) -> None:
    original = train(model_type="unigram", vocab_size=50, normalization_rule_name=rule)
    charsmap = charsmap_of(original)
    keys = keys_of(
        original,
        "t5",
        eos_token_id=original.eos_id(),
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=charsmap or None,
    )
    subject = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", keys))
    assert bool(charsmap) is (rule != "identity")
    for text in TEXTS:
        ids = original.encode(text)
        assert subject.encode(text, add_special=False) == ids, text
        assert subject.encode(text) == [*ids, original.eos_id()]


def truncated(table: bytes) -> bytes:
    return table[: len(table) // 2]


def wild_offset(table: bytes) -> bytes:
    return table[:4] + b"\x00\xfc\xff\x7f" + table[8:]


def wild_replacement(table: bytes) -> bytes:
    units = np.frombuffer(table, "<u4", int.from_bytes(table[:4], "little") // 4, 4).copy()
    units[np.argmax(units >> 31)] = 0xFFFFFFFF
    return table[:4] + units.tobytes() + table[4 + units.nbytes :]


def wild_length(table: bytes) -> bytes:
    return b"\xff\xff\xff\x7f" + table[4:]


def open_end(table: bytes) -> bytes:
    return table + b"x"


@pytest.mark.parametrize(
    "damage", [truncated, wild_offset, wild_replacement, wild_length, open_end]
)
def test_a_damaged_normalization_table_is_refused(damage: Callable[[bytes], bytes]) -> None:
    original = train(model_type="unigram", vocab_size=50, normalization_rule_name="nmt_nfkc")
    table = charsmap_of(original)
    check_charsmap(table)
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        check_charsmap(damage(table))


def charsmap_of(processor: SentencePieceProcessor) -> bytes:
    """Field 2 of the normalizer (field 3) of the serialized model."""
    normalizer = fields(processor.serialized_model_proto())[3]
    return fields(normalizer).get(2, b"")


def fields(message: bytes) -> dict[int, bytes]:
    """The last value of each field of a protocol buffer that holds bytes."""
    found: dict[int, bytes] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        for byte in message[position:]:
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return value

    while position < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
        else:
            length = {1: 8, 5: 4}.get(kind) or varint()
            found[number] = message[position : position + length]
            position += length
    return found
