"""A file with a broken vocabulary is refused, with the key that is at fault."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ModelError, TokenizerError
from localllm.text.tokenizer import load_tokenizer
from tests.text.vocabularies import byte_level, sentence_pieces, write_vocabulary

LAST_TYPES = [1] * 255
BAD = [
    (byte_level(model=None), "model"),
    (byte_level(model=7), "model"),
    (byte_level(pre=7), "pre"),
    (byte_level(tokens=None), "tokens"),
    (byte_level(tokens="a"), "tokens"),
    (byte_level(tokens=[1, 2]), "tokens"),
    (byte_level(tokens=["a", "b", "a"]), "tokens"),
    (byte_level(token_type=LAST_TYPES), "token_type"),
    (byte_level(token_type=[*LAST_TYPES, 7]), "token_type"),
    (byte_level(token_type=[*LAST_TYPES, -1]), "token_type"),
    (byte_level(token_type=[1.0] * 256), "token_type"),
    (byte_level(token_type=["1"] * 256), "token_type"),
    (byte_level() | {"merges": None}, "merges"),
    (byte_level(merges=["ab"]), "merges"),
    (byte_level(merges=["a "]), "merges"),
    (byte_level() | {"merges": [1]}, "merges"),
    (byte_level(bos_token_id=256), "bos_token_id"),
    (byte_level(eos_token_id=-7), "eos_token_id"),
    (byte_level(eot_token_id=100000), "eot_token_id"),
    (byte_level(unknown_token_id="a"), "unknown_token_id"),
    (byte_level(add_bos_token=1), "add_bos_token"),
    (sentence_pieces(scores=None), "scores"),
    (sentence_pieces(scores=[0.0] * 10), "scores"),
    (sentence_pieces(scores=[float("nan")] * 259), "scores"),
    (sentence_pieces(add_space_prefix="yes"), "add_space_prefix"),
    (sentence_pieces(model="bert", unknown_token_id=-1), "unknown_token_id"),
    (sentence_pieces(model="t5", precompiled_charsmap=[0.5]), "precompiled_charsmap"),
]


@pytest.mark.parametrize(("keys", "at_fault"), BAD, ids=lambda value: str(value)[:20])
def test_the_key_is_named(tmp_path: Path, keys: Mapping[str, Any], at_fault: str) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", keys)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{at_fault}\b"):
        load_tokenizer(path)


@pytest.mark.parametrize("make", [byte_level, sentence_pieces], ids=["bytes", "pieces"])
def test_random_damage_never_escapes(tmp_path: Path, make: Any) -> None:
    words = [f"a-longer-word-{number}" for number in range(400)]
    path = write_vocabulary(tmp_path / "v.gguf", make(words=words))
    good = path.read_bytes()
    chance = random.Random(1)
    outcomes = {"loads": 0, "refused": 0}
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 8))):
            data[chance.randrange(24, len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            subject = load_tokenizer(path)
            subject.decode(subject.encode("Hello \u4f60 <s>", parse_special=True))
            subject.decode(range(subject.vocab_size))
            outcomes["loads"] += 1
        except ModelError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10
