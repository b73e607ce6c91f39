"""What may not be drawn: by whatever means, the output keeps to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.backends.program import FloatArray
from localllm.engine.core import EngineCore
from localllm.engine.messages import SequenceNews, Submit
from localllm.engine.restrictions import bits_of, clear_bits, set_bits
from localllm.errors import RequestError
from localllm.grammar import GrammarSpec, ThinkingBudget
from localllm.sampling_params import SamplingParams
from tests.engine.fakes import VOCAB, WORDS, FakeStep, fake_core, fake_vocabulary, run, tokens_of

END, THINK_END = 0, 1


def submit(name: str, prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> Submit:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 60, **params})
    return Submit(name, prompt, sampling, eos_ids=frozenset([END]))


def text_of(news: list[SequenceNews]) -> str:
    return "".join(WORDS[token] for token in tokens_of(news) if token > 1)


def answer(seed: int, **params: Any) -> tuple[str, str | None, list[int]]:
    """Text, reason to finish and tokens of an answer drawn with a seed."""
    news = run(fake_core(), submit("a", seed=seed, **params))["a"]
    assert news[-1].error is None
    return text_of(news), news[-1].finish_reason, tokens_of(news)


def regex(pattern: str, *after: str) -> GrammarSpec:
    return GrammarSpec("regex", pattern, after)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_complete_grammar_ends_the_output(temperature: float) -> None:
    for seed in range(5):
        text, reason, tokens = answer(seed, grammar=regex("a{3}[0-9]"), temperature=temperature)
        assert re.fullmatch("a{3}[0-9]", text)
        assert reason == "stop"
        assert END not in tokens  # nothing is left to say, so nothing more is computed


def test_a_grammar_that_may_go_on_ends_by_the_end_token() -> None:
    for seed in range(8):
        text, reason, tokens = answer(seed, grammar=regex("[a-c]+"))
        assert re.fullmatch("[a-c]+", text)
        assert (tokens[-1] == END) == (reason == "stop")


def test_max_tokens_cuts_a_grammar_with_length() -> None:
    text, reason, _ = answer(1, grammar=regex("[a-z]{100}"), max_tokens=7)
    assert reason == "length"
    assert re.fullmatch("[a-z]{7,}", text)


def test_a_grammar_complete_with_the_last_token_counts_as_complete() -> None:
    text, reason, tokens = answer(1, grammar=regex("xyz"), max_tokens=3)
    assert (text, reason, len(tokens)) == ("xyz", "stop", 3)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("choice", json.dumps(["the cab", "a", "ab--"])),
        GrammarSpec("lark", 'start: "the" (" " WORD)+ "."\nWORD: /[a-z]{1,3}/'),
        GrammarSpec("gbnf", 'root ::= "ab" num\nnum ::= [0-9] [0-9]?'),
        GrammarSpec("json_schema", '{"type": "integer", "minimum": 3, "maximum": 250}'),
    ],
)
def test_every_kind_of_grammar(spec: GrammarSpec) -> None:
    ways = {
        "choice": r"the cab|a|ab--",
        "lark": r"the( [a-z]{1,3})+\.",
        "gbnf": r"ab[0-9][0-9]?",
        "json_schema": r"[3-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|250",
    }
    for seed in range(6):
        text, reason, _ = answer(seed, grammar=spec)
        if reason == "stop":
            assert re.fullmatch(ways[spec.kind], text)
        else:
            assert spec.kind == "lark"


def test_fault_08_a_grammar_starts_after_the_thinking() -> None:
    for seed in range(12):
        text, reason, tokens = answer(seed, grammar=regex("ab[0-9]", "</think>"), max_tokens=500)
        assert reason == "stop"
        assert tokens.count(THINK_END) == 1  # an end token cannot come before
        at = tokens.index(THINK_END)
        assert re.fullmatch("ab[0-9]", "".join(WORDS[token] for token in tokens[at + 1 :]))
        assert text.endswith(text[-3:])


def test_the_marker_may_be_text_in_several_tokens() -> None:
    for seed in range(6):
        text, reason, _ = answer(seed, grammar=regex("[xy]z", "ab", "-"), max_tokens=500)
        assert reason == "stop"
        assert re.fullmatch(r"(?s)((?!ab|-).)*(ab|-)[xy]z", text) or "ab" in text[:-2]


def test_thinking_is_ended_when_its_budget_is_spent() -> None:
    forced = (WORDS.index("\n"), THINK_END)
    budget = ThinkingBudget(5, ("</think>",), forced)
    for seed in range(10):
        _, _, tokens = answer(
            seed, thinking_budget=budget, grammar=regex("ab", "</think>"), min_tokens=3
        )
        at = tokens.index(THINK_END)
        assert at <= 6
        if at == 6:
            assert tuple(tokens[5:7]) == forced
        assert "".join(WORDS[token] for token in tokens[at + 1 :]) == "ab"
    _, _, tokens = answer(1, thinking_budget=ThinkingBudget(0, ("</think>",), forced))
    assert tuple(tokens[:2]) == forced


def test_no_thinking_budget_stands_behind_the_end_of_thinking() -> None:
    forced = (THINK_END,)
    early = {THINK_END: 100.0}
    news = run(
        fake_core(),
        submit("a", thinking_budget=ThinkingBudget(2, ("</think>",), forced), logit_bias=early),
    )["a"]
    tokens = tokens_of(news)
    assert tokens[:3] == [THINK_END] * 3  # drawn, not forced


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(
        st.text("abc12 -the", min_size=1, max_size=5), min_size=1, max_size=5, unique=True
    ),
    seed=st.integers(0, 2**32),
)
def test_bad_words_never_come_up_however_they_are_cut(words: list[str], seed: int) -> None:
    text, _, _ = answer(seed, bad_words=tuple(words), ignore_eos=True)
    assert not [word for word in words if word in text]


def test_without_bad_words_they_would_come_up() -> None:
    assert any("b" in answer(seed, ignore_eos=True)[0] for seed in range(5))


def test_min_tokens_keeps_the_end_away() -> None:
    ends = {END: 100.0, 9: 90.0}
    _, reason, tokens = answer(1, min_tokens=5, logit_bias=ends, temperature=0.0)
    assert (len(tokens), reason) == (6, "stop")
    assert END not in tokens[:5]
    _, _, tokens = answer(1, min_tokens=5, logit_bias=ends, stop_token_ids=(9,))
    assert 9 not in tokens[:5]
    assert END not in tokens[:5]


def test_a_grammar_ends_sooner_than_min_tokens() -> None:
    assert answer(1, grammar=regex("ab?"), min_tokens=30, temperature=0.0)[1] == "stop"
    text, _, _ = answer(1, grammar=regex("[a-b]+"), min_tokens=20)
    assert len(text) >= 20


def test_ignored_end_tokens_do_not_come_while_the_grammar_can_go_on() -> None:
    text, reason, tokens = answer(1, grammar=regex("[a-b]{2,9}"), ignore_eos=True)
    assert reason == "stop"
    assert len(text) == 9
    assert END not in tokens


def test_stop_token_ids_do_not_cut_a_grammar_short() -> None:
    a = WORDS.index("a")
    for seed in range(10):
        text, reason, tokens = answer(seed, grammar=regex("[ab]{2}c?"), stop_token_ids=(a,))
        assert reason == "stop"
        assert re.fullmatch("[ab]{2}c?", text)
        assert a not in tokens


def test_where_no_token_is_left_the_sequence_fails_and_no_other() -> None:
    core = fake_core()
    news = run(
        core,
        submit("bad", grammar=regex("abc"), bad_words=("b",)),
        submit("good", grammar=regex("abc")),
    )
    assert news["bad"][-1].finish_reason == "error"
    assert isinstance(news["bad"][-1].failure(), RequestError)
    assert "leave no token" in (news["bad"][-1].error or "")
    assert text_of(news["good"]) == "abc"
    core.check_integrity()


@pytest.mark.parametrize(
    "make",
    [
        lambda: fake_core(tokens=48),
        lambda: fake_core(tokens=5),
        lambda: fake_core(spare_blocks=2),
    ],
    ids=["budget of 48", "budget of 5", "small pool"],
)
def test_company_chunks_and_preemption_change_no_restricted_answer(
    make: Callable[[], EngineCore],
) -> None:
    kinds: list[dict[str, Any]] = [
        {"grammar": regex("([a-z]{3} ){8}")},
        {"grammar": regex("[0-9]{20}", "</think>")},
        {"bad_words": ("a", "th"), "min_tokens": 20},
        {"mirostat": 2},
        {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0.0},
        {"xtc_probability": 0.5, "typical_p": 0.9},
        {"grammar": GrammarSpec("json_object"), "dry_multiplier": 1.0},
        {},
    ]
    requests = [
        submit(f"s{i}", tuple(range(2, 12 + 7 * i)), seed=i, max_tokens=40, **kind)
        for i, kind in enumerate(kinds * 2)
    ]
    alone = {r.sequence_id: tokens_of(run(fake_core(), r)[r.sequence_id]) for r in requests}
    core = make()
    together = run(core, *requests)
    assert {name: tokens_of(news) for name, news in together.items()} == alone
    core.check_integrity()


def test_the_small_pool_does_preempt_restricted_sequences() -> None:
    core = fake_core(spare_blocks=2)
    run(
        core,
        *(submit(f"s{i}", tuple(range(2, 40)), grammar=regex("[a-z]{50}")) for i in range(8)),
    )
    assert core.stats.preemptions > 0


def test_a_broken_grammar_is_an_error_and_harms_nobody() -> None:
    core = fake_core()
    news = run(
        core,
        submit("bad", grammar=regex("(")),
        submit("empty", grammar=GrammarSpec("json_schema", '{"$ref": "#"}')),
        submit("good"),
    )
    assert news["bad"][0].finish_reason == news["empty"][0].finish_reason == "error"
    assert "unclosed" in (news["bad"][0].error or "")
    assert tokens_of(news["good"])


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("lark", 'start: "a"{1000000000}'),
        GrammarSpec("regex", "a{1000000000}"),
        GrammarSpec("lark", "start: W\nW: " + " & ".join(f"/.*a.{{{i}}}b/" for i in range(14))),
    ],
)
def test_a_grammar_that_costs_too_much_is_refused_before_the_first_token(spec: GrammarSpec) -> None:
    (news,) = run(fake_core(), submit("bad", grammar=spec))["bad"]
    assert isinstance(news.failure(), RequestError)
    assert news.tokens == ()


@pytest.mark.parametrize("kind", ["choice", "lark", "rules", "json_schema"])
def test_thousands_of_alternatives(kind: str) -> None:
    words = [f"w{i}e" for i in range(8000)]
    rules = "\n".join(f'r{i}: "{word}"' for i, word in enumerate(words))
    spec = {
        "choice": GrammarSpec("choice", json.dumps(words)),
        "lark": GrammarSpec("lark", "start: " + " | ".join(f'"{word}"' for word in words)),
        "rules": GrammarSpec("lark", f"start: {' | '.join(f'r{i}' for i in range(8000))}\n{rules}"),
        "json_schema": GrammarSpec("json_schema", json.dumps({"enum": [*range(8000)]})),
    }[kind]
    text, reason, _ = answer(3, grammar=spec)
    assert reason == "stop"
    assert text in words or int(text) < 8000


def test_choices_may_have_any_characters() -> None:
    choices = ["12\n.", " a-", "?!", "ab.."]
    found = {
        answer(seed, grammar=GrammarSpec("choice", json.dumps(choices)))[0] for seed in range(9)
    }
    assert found <= set(choices)
    assert len(found) > 1


def test_a_sequence_may_be_cancelled_while_it_is_prepared() -> None:
    core = fake_core()
    core.add(submit("a", grammar=regex("a")))
    assert core.has_work
    with pytest.raises(ValueError, match="exists"):
        core.add(submit("a"))
    core.cancel("a")
    (news,) = core.step().news
    assert (news.sequence_id, news.finish_reason) == ("a", "cancelled")
    idle = not core.has_work
    assert idle
    core.close()


@given(st.sets(st.integers(-2, VOCAB + 2)), st.sets(st.integers(0, VOCAB - 1)))
def test_bits(cleared: set[int], kept: set[int]) -> None:
    row = np.zeros(2, np.uint32)
    set_bits(row, bits_of(kept, VOCAB))
    clear_bits(row, bits_of(cleared, VOCAB))
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits).tolist()) == kept - cleared


def test_words_by_their_beginning_and_by_what_they_have_within() -> None:
    vocabulary = fake_vocabulary()
    for part in ("a", "ab", "b", "-", " ", "q", "thexx"):
        begin = {i for i, word in enumerate(WORDS) if i > 1 and word.startswith(part)}
        have = {i for i, word in enumerate(WORDS) if i > 1 and part in word}
        assert set(vocabulary.starting_with(part.encode()).tolist()) == begin
        assert set(vocabulary.containing(part.encode()).tolist()) == have


def test_a_restriction_alone_asks_the_device_for_no_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    logits = FakeStep.logits

    def count(step: FakeStep) -> FloatArray:
        asked.append(step)
        return logits(step)

    monkeypatch.setattr(FakeStep, "logits", count)
    assert answer(1, grammar=regex("abc"))[0] == "abc"
    assert asked == []
    assert answer(1, grammar=regex("abc"), logprobs=1)[0] == "abc"
    assert len(asked) > 0
