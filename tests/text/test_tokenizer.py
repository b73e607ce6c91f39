from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import GGUFError, RequestError, TokenizerError
from localllm.gguf import GGUFFile
from localllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import TokenizerCase, tokenizer_cases
from tests.text.vocabularies import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    byte_level,
    sentence_pieces,
    tokenizer,
    write_vocabulary,
)

Load = Callable[[Mapping[str, Any]], Tokenizer]
LOSSY = "bert-bge"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda keys: load_tokenizer(write_vocabulary(tmp_path / "vocabulary.gguf", keys))


@pytest.mark.parametrize("case", tokenizer_cases(), ids=lambda case: case.name)
def test_agrees_with_llama_cpp(case: TokenizerCase) -> None:
    encode = tokenizer(case.name).encode
    assert len(case.texts()) == len(case.ids()) > 40
    for text, ids in zip(case.texts(), case.ids(), strict=True):
        assert encode(text, add_special=False) == ids, text


@pytest.mark.parametrize(
    "case", [case for case in tokenizer_cases() if case.name != LOSSY], ids=lambda case: case.name
)
def test_decodes_what_it_encoded(case: TokenizerCase) -> None:
    subject = tokenizer(case.name)
    for text in case.texts():
        assert subject.decode(subject.encode(text)) == text
        assert subject.decode(subject.encode(text, add_special=False)) == text


def test_takes_an_open_file() -> None:
    (case,) = tokenizer_cases("llama-spm")
    with GGUFFile.open(case.gguf) as file:
        subject = load_tokenizer(file)
    assert subject.encode("Hello world") == [1, 15043, 3186]
    assert subject.vocab_size == 32000


class TestBos:
    def test_is_added_once(self) -> None:
        subject = tokenizer("llama-spm")
        assert subject.bos_id == 1
        assert subject.add_bos
        assert subject.encode("Hi")[0] == 1
        assert subject.encode("Hi", add_special=False)[0] != 1
        assert subject.encode("") == [1]

    def test_is_not_doubled_where_the_text_has_it(self) -> None:
        ids = tokenizer("llama-spm").encode("<s>Hi", parse_special=True)
        assert ids.count(1) == 1
        assert ids == tokenizer("llama-spm").encode("Hi")

    def test_is_text_where_special_tokens_are_not_parsed(self) -> None:
        subject = tokenizer("llama-spm")
        ids = subject.encode("<s>Hi")
        assert ids.count(1) == 1
        assert subject.decode(ids) == "<s>Hi"

    def test_follows_the_pre_tokenizer_and_the_file(self, load: Load) -> None:
        special = {"<|bos|>": CONTROL}
        bos = 256
        assert load(byte_level(special, pre="gpt-2", bos_token_id=bos)).encode("a") == [64]
        llama3 = byte_level(special, pre="llama-bpe", bos_token_id=bos)
        assert load(llama3).encode("a") == [bos, 64]
        assert load({**llama3, "add_bos_token": False}).encode("a") == [64]

    def test_without_an_id_nothing_is_added(self, load: Load) -> None:
        assert load(byte_level(pre="llama-bpe")).encode("a") == [64]

    def test_eos_is_added_where_the_file_asks_for_it(self, load: Load) -> None:
        special = {"<|eos|>": CONTROL}
        subject = load(byte_level(special, eos_token_id=256, add_eos_token=True))
        assert subject.encode("a") == [64, 256]
        assert subject.encode("a<|eos|>", parse_special=True) == [64, 256]
        assert subject.encode("a", add_special=False) == [64]

    def test_bert_wraps_a_text_in_its_two(self) -> None:
        subject = tokenizer("bert-bge")
        cls, sep = 101, 102
        ids = subject.encode("hello world")
        assert (ids[0], ids[-1]) == (cls, sep)
        assert subject.decode(ids) == "hello world"


class TestSpecialTokens:
    def test_control_tokens_are_parsed_on_request_only(self) -> None:
        subject = tokenizer("phi-3")
        user = subject.special_tokens["<|user|>"]
        assert user in subject.encode("<|user|>", parse_special=True)
        assert user not in subject.encode("<|user|>")
        assert subject.decode(subject.encode("<|user|>")) == "<|user|>"

    def test_phi_3_drops_the_spaces_after_them(self) -> None:
        subject = tokenizer("phi-3")
        close = subject.encode("<|user|>Hi<|end|>", parse_special=True)
        assert subject.encode("<|user|> \n Hi<|end|>\n", parse_special=True) == close

    def test_user_defined_tokens_are_found_in_any_text(self, load: Load) -> None:
        subject = load(byte_level({"<think>": USER_DEFINED, "<end>": CONTROL}))
        think, end = 256, 257
        assert think in subject.encode("a<think>b")
        assert end not in subject.encode("a<end>b")
        assert subject.decode(subject.encode("a<think>b")) == "a<think>b"

    def test_the_longest_of_several_wins(self, load: Load) -> None:
        subject = load(byte_level({"\n": USER_DEFINED, "\n\n\n": USER_DEFINED, "ab": USER_DEFINED}))
        one, three, word = 256, 257, 258
        assert subject.encode("\n" * 7 + "ab") == [three, three, one, word]

    def test_no_merge_makes_a_control_token(self, load: Load) -> None:
        keys = byte_level({"ab": CONTROL}, merges=["a b"], pre="llama-bpe")
        subject = load(keys)
        assert subject.encode("ab", add_special=False) == [64, 65]

    def test_sentence_pieces_never_make_a_control_token(self, load: Load) -> None:
        subject = load(sentence_pieces({"ab": CONTROL}, ["\u2581", "a", "b"]))
        assert subject.decode(subject.encode("ab")) == "ab"
        assert subject.special_tokens["ab"] not in subject.encode("ab")

    def test_hidden_and_shown(self) -> None:
        subject = tokenizer("phi-3")
        end = subject.special_tokens["<|end|>"]
        assert subject.is_control(end)
        assert subject.token_bytes(end) == b""
        assert subject.token_text(end) == "<|end|>"
        ids = subject.encode("Hi", add_special=False)
        assert subject.decode([*ids, end]) == "Hi"
        assert subject.decode([*ids, end], skip_special=False) == "Hi<|end|>"
        assert subject.unk_id == 0
        assert subject.decode([0], skip_special=False) == "<unk>"
        assert subject.decode([0]) == ""


class TestEndOfGeneration:
    def test_by_id_and_by_text(self) -> None:
        subject = tokenizer("phi-3")
        texts = {subject.token_text(token) for token in subject.eog_ids}
        assert texts == {"<|endoftext|>", "<|end|>", "</s>"}
        assert subject.eos_id in subject.eog_ids

    def test_more_ids_from_the_file(self, load: Load) -> None:
        special = {"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL}
        keys = byte_level(special, eos_token_id=256, eot_token_id=257, eom_token_id=258)
        assert load(keys).eog_ids == {256, 257, 258}

    @pytest.mark.parametrize(("begin", "ends"), [(CONTROL, True), (USER_DEFINED, False)])
    def test_the_html_tag_is_no_end(self, load: Load, begin: int, ends: bool) -> None:
        special = {"<s>": begin, "</s>": USER_DEFINED, "<eos>": CONTROL}
        subject = load(byte_level(special, eos_token_id=258))  # type: ignore[arg-type]
        assert (257 in subject.eog_ids) is ends

    def test_a_text_that_ends_is_a_control_token_whatever_the_file_says(self, load: Load) -> None:
        subject = load(byte_level({"<|im_end|>": NORMAL}))
        assert subject.is_control(256)
        assert 256 not in subject.encode("<|im_end|>")
        assert 256 in subject.encode("<|im_end|>", parse_special=True)

    def test_harmony_goes_on_after_a_message(self, load: Load) -> None:
        names = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
        subject = load(byte_level(dict.fromkeys(names, CONTROL)))
        end, finish, call, channel = range(256, 260)
        assert subject.eog_ids == {finish, call}
        assert subject.token_bytes(channel) == b"<|channel|>"
        assert subject.token_bytes(end) == b"<|end|>"
        assert channel not in subject.encode("<|channel|>")


class TestDecode:
    def test_a_continuation_keeps_its_first_space(self) -> None:
        subject = tokenizer("llama-spm")
        ids = subject.encode("world", add_special=False)
        assert subject.decode(ids) == "world"
        assert subject.decode(ids, continuation=True) == " world"

    def test_broken_utf8_is_replaced(self) -> None:
        subject = tokenizer("llama-spm")
        first_byte = subject.encode("\U0001f999", add_special=False)[1]
        assert subject.token_bytes(first_byte) == b"\xf0"
        assert subject.decode([first_byte, *subject.encode("x", add_special=False)]) == "\ufffd x"

    @pytest.mark.parametrize("token", [-1, 32000])
    def test_an_id_that_does_not_exist_is_the_callers_fault(self, token: int) -> None:
        with pytest.raises(RequestError, match=f"{token} is not one of 32000") as caught:
            tokenizer("llama-spm").decode([token])
        assert caught.value.param == "tokens"

    def test_half_a_surrogate_pair_is_replaced(self) -> None:
        for name in ("llama-spm", "gpt-2", "bert-bge"):
            subject = tokenizer(name)
            assert subject.encode("a\ud800b") == subject.encode("a\ufffdb")
        assert tokenizer("gpt-2").decode(tokenizer("gpt-2").encode("\ud83e\udd99")) == "\U0001f999"


class TestGemma4:
    """A byte-pair vocabulary on characters, with spaces and bytes as in SentencePiece."""

    @pytest.fixture
    def subject(self, load: Load) -> Tokenizer:
        words = ["\u2581", "a", "b", "ab", "\n", "\n\n\n"]
        keys = sentence_pieces({"<bos>": CONTROL}, words)
        bos = len(keys["tokens"]) - 1
        merges = ["a b"]
        return load({**keys, "model": "gemma4", "merges": merges, "bos_token_id": bos})

    def test_spaces_bytes_and_merges(self, subject: Tokenizer) -> None:
        ids = subject.encode("ab \u00e9", add_special=False)
        tokens = [subject.token_text(token) for token in ids]
        assert tokens == ["ab", "\u2581", "<0xC3>", "<0xA9>"]
        assert subject.decode(ids) == "ab \u00e9"

    def test_runs_of_newlines_are_taken_whole(self, subject: Tokenizer) -> None:
        ids = subject.encode("a\n\n\nb\n\n", add_special=False)
        assert [subject.token_text(token) for token in ids] == ["a", "\n\n\n", "b", "\n", "\n"]

    def test_bos_is_added_against_the_file(self, subject: Tokenizer) -> None:
        assert subject.encode("a")[0] == subject.bos_id


class TestFiles:
    @pytest.mark.parametrize("kind", ["rwkv", "plamo2", "none", "whitespace"])
    def test_kinds_that_are_not_supported_are_named(self, load: Load, kind: str) -> None:
        with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.model.*'{kind}'"):
            load(byte_level(model=kind))

    def test_an_unknown_pre_tokenizer_is_named(self, load: Load) -> None:
        with pytest.raises(TokenizerError, match="'gpt-9'"):
            load(byte_level(pre="gpt-9"))

    def test_a_missing_pre_tokenizer_is_said(
        self, load: Load, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            subject = load(byte_level(pre=None))
        assert "tokenizer.ggml.pre" in caplog.text
        assert subject.encode("ab 12") == load(byte_level(pre="default")).encode("ab 12")

    def test_a_padding_token_that_is_not_there_is_ignored(
        self, load: Load, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert load(byte_level(padding_token_id=256)).pad_id is None
        assert "padding_token_id" in caplog.text

    def test_an_empty_token_gets_a_name(self, load: Load) -> None:
        keys = byte_level({"x": CONTROL})
        keys["tokens"][256] = ""
        assert load(keys).token_text(256) == "[EMPTY_256]"

    def test_merges_that_make_no_token_are_left_out(
        self, load: Load, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = byte_level(words=["ab"], merges=["x y", "a b"])
        assert load(keys).encode("abxy") == [256, 87, 88]
        assert "1 merges" in caplog.text

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError):
            load_tokenizer(tmp_path / "none.gguf")


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    subject = load_tokenizer(smollm2)
    assert subject.vocab_size == 49152
    assert not subject.add_bos
    text = "Hello, 1234 worlds\n\n  \u4f60\u597d"
    assert subject.decode(subject.encode(text)) == text
    assert {"<|im_end|>", "<|endoftext|>"} <= {subject.token_text(t) for t in subject.eog_ids}


@pytest.mark.model
def test_gemma3(gemma3: Path) -> None:
    subject = load_tokenizer(gemma3)
    assert subject.vocab_size == 262144
    text = "<table>\n\n\n  Hello, 1234 worlds\t\t\u4f60\u597d</table>"
    ids = subject.encode(text)
    assert ids[0] == subject.bos_id
    assert subject.decode(ids) == text
    assert subject.special_tokens["<table>"] in ids
    assert {"<eos>", "<end_of_turn>"} == {subject.token_text(t) for t in subject.eog_ids}
