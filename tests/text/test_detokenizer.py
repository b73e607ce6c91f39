from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.text.detokenizer import Detokenizer
from tests.text.vocabularies import tokenizer


class Pieces:
    """A vocabulary whose tokens are any bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int, /) -> bytes:
        return self.pieces[token]


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """Each piece pushed alone; what was shown each time, at the end what was held back."""
    subject = Detokenizer(Pieces(pieces), stop)
    shown = [subject.push([token]) for token in range(len(pieces))]
    return [*shown, subject.finish()], subject.stopped_by


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    for start in range(len(text)):
        for candidate in sorted(stop, key=len):
            if text.startswith(candidate, start):
                return text[:start], candidate
    return text, None


# Bytes and letters so few that stop strings and broken characters come up all the time.
PIECES = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", b"", b"\xf0", b"\x9f", b"\xa6\x99", b"\xc3", b"\xa9", b" "]
    ),
    max_size=24,
)
STOPS = st.lists(st.text("ab \u00e9\ufffd", min_size=1, max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(PIECES, STOPS, st.randoms(use_true_random=False))
def test_any_split_gives_the_text_before_the_first_stop(
    pieces: list[bytes], stop: list[str], chance: object
) -> None:
    whole = b"".join(pieces).decode("utf-8", "replace")
    subject = Detokenizer(Pieces(pieces), stop)
    shown, position = "", 0
    while position < len(pieces):
        size = chance.randint(1, 4)  # type: ignore[attr-defined]
        shown += subject.push(range(position, min(position + size, len(pieces))))
        position += size
    shown += subject.finish()
    assert (shown, subject.stopped_by) == expected(whole, stop)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_come_out_as_when_decoded_at_once(data: bytes) -> None:
    shown, _ = stream([bytes([byte]) for byte in data])
    assert "".join(shown) == data.decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 31999), max_size=20))
def test_agrees_with_the_tokenizer(ids: list[int]) -> None:
    subject = tokenizer("llama-spm")
    detokenizer = Detokenizer(subject)
    shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert shown == subject.decode(ids, continuation=True)


class TestHoldsBack:
    def test_nothing_that_is_certain(self) -> None:
        assert stream([b"Hello", b" world", b""]) == (["Hello", " world", "", ""], None)

    def test_only_the_bytes_of_an_unfinished_character(self) -> None:
        shown, _ = stream([b"x\xf0", b"\x9f\xa6", b"\x99y"])
        assert shown == ["x", "", "\U0001f999y", ""]

    def test_an_unfinished_character_until_the_end(self) -> None:
        assert stream([b"x\xf0\x9f"])[0] == ["x", "\ufffd"]

    def test_a_broken_character_only_until_it_is_known_to_be(self) -> None:
        assert stream([b"\xf0", b"x"])[0] == ["", "\ufffdx", ""]

    def test_what_may_become_a_stop_string(self) -> None:
        shown, stopped_by = stream([b"Hi <", b"|e", b"x"], ("<|end|>",))
        assert shown == ["Hi ", "", "<|ex", ""]
        assert stopped_by is None

    def test_what_may_become_a_stop_string_until_the_end(self) -> None:
        assert stream([b"Hi <|e"], ("<|end|>",)) == (["Hi ", "<|e"], None)


class TestStops:
    def test_across_tokens(self) -> None:
        shown, stopped_by = stream([b"one EN", b"D two"], ("END",))
        assert shown == ["one ", "", ""]
        assert stopped_by == "END"

    def test_shows_nothing_after(self) -> None:
        assert stream([b"aSTOPb", b"c"], ("STOP",)) == (["a", "", ""], "STOP")

    def test_of_several_the_first_in_the_text(self) -> None:
        assert stream([b"a \n\n b END"], ("END", "\n\n")) == (["a ", ""], "\n\n")

    def test_waits_for_one_that_began_earlier(self) -> None:
        assert stream([b"xabc", b"d"], ("c", "abcd"))[0] == ["x", "", ""]
        assert stream([b"xabc", b"d"], ("c", "abcd"))[1] == "abcd"
        assert stream([b"xabc", b"e"], ("c", "abcd")) == (["x", "ab", ""], "c")
        assert stream([b"xabc"], ("c", "abcd")) == (["x", "ab"], "c")

    def test_of_two_at_one_place_the_shorter(self) -> None:
        assert stream([b"xab"], ("abc", "ab")) == (["x", ""], "ab")

    def test_may_be_a_broken_character(self) -> None:
        assert stream([b"a\xff"], ("\ufffd",)) == (["a", ""], "\ufffd")

    def test_an_empty_one_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            Detokenizer(Pieces([]), ("",))


@given(PIECES, STOPS, st.integers(0, 8), st.integers(1, 5))
def test_stop_strings_are_looked_for_behind_the_free_tokens(
    pieces: list[bytes], stop: list[str], free: int, at_once: int
) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begin = decoder.decode(b"".join(pieces[:free]))
    rest, stopped_by = expected(
        decoder.decode(b"".join(pieces[free:])) + decoder.decode(b"", final=True), stop
    )
    subject = Detokenizer(Pieces(pieces), stop, free)
    ids = range(len(pieces))
    shown = [subject.push(ids[i : i + at_once]) for i in range(0, len(pieces), at_once)]
    assert "".join(shown) + subject.finish() == begin + rest
    assert subject.stopped_by == stopped_by


@given(PIECES, STOPS, st.integers(0, 20), st.integers(0, 20))
def test_stop_strings_are_not_looked_for_where_the_text_is_shielded(
    pieces: list[bytes], stop: list[str], first: int, last: int
) -> None:
    """From the time that `first` characters are shown until `last` are."""
    text = b"".join(pieces).decode("utf-8", "replace")
    shown = ""
    subject = Detokenizer(Pieces(pieces), stop, shielded=lambda: first <= len(shown) < last)
    for token in range(len(pieces)):
        for piece in subject.pieces([token]):
            shown += piece
    shown += subject.finish()
    before, _ = expected(text[:first], stop)
    assert text.startswith(shown)
    if len(before) < min(first, len(text)):
        assert shown == before or len(shown) >= first
    elif subject.stopped_by is None:
        assert shown == text
