"""Long texts: refused before they are tokenized, and never while others wait."""

from __future__ import annotations

import threading

import pytest

from localllm.errors import ContextLengthError, RequestError
from localllm.text.bound import PIECE, TextBound, translated
from localllm.text.splitter import SpecialTokenSplitter
from tests.text.vocabularies import tokenizer

LONG = "some words " * 100_000


class Counted:
    """Encodes a character to a token, and knows how many it was given."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str) -> str:
        self.characters += len(text)
        return text


def test_only_the_beginning_of_a_far_too_long_text_is_tokenized() -> None:
    encode = Counted()
    with pytest.raises(ContextLengthError, match="with over 1000 tokens it exceeds") as error:
        TextBound(1000, "prompt").check("x" * 10**7, encode)
    assert encode.characters == PIECE
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


def test_a_long_text_of_few_tokens_passes() -> None:
    TextBound(1000, "prompt").check(" " * 10**6, lambda text: text[::600])


def test_a_text_that_may_fit_is_not_looked_at() -> None:
    encode = Counted()
    TextBound(100_000, "prompt").check("x" * 800_000, encode)
    assert encode.characters == 0


def test_what_is_wanted_whole_has_a_limit_too() -> None:
    encode = Counted()
    TextBound(1000, "content", whole=True).check("x" * 2**20, encode)
    with pytest.raises(RequestError, match="content: 1048577 characters; at most 1048576"):
        TextBound(1000, "content", whole=True).check("x" * (2**20 + 1), encode)
    TextBound(10**6, "content", whole=True).check("x" * (2**20 + 1), encode)
    assert encode.characters == 0


def test_a_tokenizer_refuses_what_its_bound_refuses() -> None:
    encode = tokenizer("gpt-2").encode
    with pytest.raises(ContextLengthError):
        encode(LONG, bound=TextBound(1000, "prompt"))
    with pytest.raises(RequestError):
        encode(LONG, bound=TextBound(1000, "prompt", whole=True))
    assert encode(LONG, bound=TextBound(200_000, "prompt")) == encode(LONG)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "bert-bge"])
def test_other_threads_run_while_a_text_is_tokenized(name: str) -> None:
    """The library works in another thread's time: this one counts on beside it."""
    subject = tokenizer(name)
    subject.encode("warm")
    done = threading.Event()
    started = threading.Event()

    def encode() -> None:
        started.set()
        subject.encode(LONG)
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    started.wait()
    rounds = 0
    while not done.wait(0.001):
        rounds += 1
    worker.join()
    assert rounds > 5


def test_a_long_text_is_translated_as_a_short_one() -> None:
    table = {ord("a"): "xyz", ord("b"): ""}
    text = "abc" * PIECE
    assert translated(text, table) == text.translate(table)


@pytest.mark.parametrize("offset", [-3, -2, -1, 0, 1])
def test_a_special_token_is_found_on_the_edge_of_a_window(offset: int) -> None:
    splitter = SpecialTokenSplitter({"<s>": 1, "<": 2, "<|": 3})
    before = "x" * (PIECE + offset)
    for token, id in (("<s>", 1), ("<", 2), ("<|", 3)):
        text = f"{before}{token}{before}"
        assert list(splitter.split(text)) == [before, id, before]
