"""The scheduler's rules one by one; the random traces beside this prove that they hold together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localllm.engine.admission import Admission
from localllm.engine.kv_manager import KVManager
from localllm.engine.messages import SequenceNews, Submit
from localllm.engine.scheduler import Scheduler, StepBudget
from localllm.engine.sequence import NUMERICAL_ERROR, ChunkResult, Plan, StepResult
from localllm.sampling_params import SamplingParams

SIZE = 4
CONTEXT = 64
EOS = 0
TOKEN = 5


def scheduler(
    *, n_blocks: int = 64, tokens: int = 16, seqs: int = 4, rows: int = 8, prefix_cache: bool = True
) -> Scheduler:
    kv = KVManager([None], [n_blocks], SIZE, prefix_cache=prefix_cache)
    return Scheduler(kv, StepBudget(tokens, seqs, rows), Admission(CONTEXT, vocab_size=1000))


def submit(
    name: str,
    n_prompt: int,
    *,
    first: int = 100,
    max_tokens: int | None = None,
    priority: int = 0,
    prompt_logits: bool = False,
    params: SamplingParams | None = None,
) -> Submit:
    """Prompts of different `first` share no prefix."""
    return Submit(
        sequence_id=name,
        prompt=tuple(range(first, first + n_prompt)),
        params=params or SamplingParams(max_tokens=max_tokens),
        eos_ids=frozenset([EOS]),
        priority=priority,
        prompt_logits=prompt_logits,
    )


def step(
    engine: Scheduler, sample: Callable[[str], int] = lambda _: TOKEN
) -> tuple[dict[str, int], dict[str, SequenceNews]]:
    """One step: how many tokens each sequence computed, and the news."""
    plan = engine.schedule()
    result = StepResult(
        plan,
        tuple(ChunkResult(sample(c.sequence.id) if c.rows else None) for c in plan.chunks),
    )
    news = {one.sequence_id: one for one in engine.update(result)}
    engine.check_integrity()
    return computed(plan), news


def computed(plan: Plan) -> dict[str, int]:
    return {chunk.sequence.id: chunk.end - chunk.start for chunk in plan.chunks}


def finish(engine: Scheduler) -> dict[str, SequenceNews]:
    """Steps until nothing is left; the last news of each sequence."""
    last: dict[str, SequenceNews] = {}
    for _ in range(1000):
        if not engine.has_work:
            return last
        last |= step(engine)[1]
    raise AssertionError("the scheduler does not come to an end")


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    engine = scheduler()
    engine.add(submit("a", 40))
    assert step(engine) == ({"a": 16}, {})
    assert step(engine) == ({"a": 16}, {})
    chunks, news = step(engine)
    assert chunks == {"a": 8}
    assert news["a"].tokens == (TOKEN,)
    assert step(engine)[0] == {"a": 1}
    assert engine.stats().prompt_tokens == 40
    assert engine.stats().generated_tokens == 2


def test_a_prompt_does_not_stall_those_that_generate() -> None:
    engine = scheduler(tokens=16)
    engine.add(submit("long", 60, first=200))
    engine.add(submit("short", 3))
    engine.add(submit("other", 2, first=300))
    assert step(engine)[0] == {"long": 12, "short": 3, "other": 1}
    assert step(engine)[0] == {"long": 14, "short": 1, "other": 1}
    engine.cancel("long")
    engine.add(submit("next", 30, first=400))
    assert step(engine)[0] == {"short": 1, "other": 1, "next": 14}
    assert step(engine)[0] == {"short": 1, "other": 1, "next": 14}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    engine = scheduler(tokens=16)
    engine.add(submit("long", 60, first=200, priority=1))
    assert step(engine)[0] == {"long": 16}
    engine.add(submit("short", 6))
    assert step(engine)[0] == {"long": 12, "short": 4}  # it finds the other running
    assert step(engine)[0] == {"short": 2, "long": 14}  # and goes first from then on
    assert step(engine)[0] == {"short": 1, "long": 15}


def test_a_more_important_prompt_leaves_a_token_to_those_that_generate() -> None:
    engine = scheduler(tokens=8)
    engine.add(submit("chat", 5, first=300))
    step(engine)
    engine.add(submit("urgent", 30, first=200, priority=-1))
    assert step(engine)[0] == {"chat": 1, "urgent": 7}
    assert step(engine)[0] == {"urgent": 7, "chat": 1}


def test_waiting_ones_come_by_priority_then_arrival() -> None:
    engine = scheduler(seqs=1)
    engine.add(submit("first", 3, max_tokens=1))
    engine.add(submit("late", 3, max_tokens=1, first=200, priority=1))
    engine.add(submit("urgent", 3, max_tokens=1, first=300, priority=-1))
    engine.add(submit("second", 3, max_tokens=1, first=400))
    order = [name for _ in range(4) for name in step(engine)[0]]
    assert order == ["urgent", "first", "second", "late"]


def test_at_most_max_num_seqs_run() -> None:
    engine = scheduler(seqs=2)
    for i in range(4):
        engine.add(submit(f"s{i}", 2, first=100 * i, max_tokens=2))
    step(engine)
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)
    assert set(finish(engine)) == {"s0", "s1", "s2", "s3"}


def test_when_the_pool_is_full_the_least_important_latest_goes_first() -> None:
    engine = scheduler(n_blocks=16, tokens=64, prefix_cache=False)
    engine.add(submit("low", 11, first=100, priority=1))
    engine.add(submit("old", 11, first=200))
    engine.add(submit("new", 11, first=300))
    step(engine)
    gone = []
    for _ in range(40):
        before = {s.id for s in engine._running}
        step(engine)
        gone += sorted(before - {s.id for s in engine._running})
    assert gone == ["low", "new"]
    assert engine.stats().preemptions == 2
    news = finish(engine)
    assert {n.finish_reason for n in news.values()} == {"length"}
    assert engine.stats().kv_usage == 0.0


def test_a_preempted_sequence_repeats_no_news_and_keeps_its_tokens() -> None:
    engine = scheduler(n_blocks=16, tokens=64)
    engine.add(submit("old", 20, first=100))
    engine.add(submit("new", 20, first=200))
    tokens: dict[str, int] = {"old": 0, "new": 0}
    while engine.has_work:
        for name, news in step(engine)[1].items():
            tokens[name] += len(news.tokens)
            assert news.cached_tokens == 0, "what a resumption finds is no hit of the prompt"
    assert engine.stats().preemptions > 0
    assert tokens == {"old": CONTEXT - 20, "new": CONTEXT - 20}


def test_choices_of_one_prompt_compute_it_once() -> None:
    engine = scheduler(tokens=64)
    for i in range(4):
        engine.add(submit(f"choice{i}", 33))
    assert step(engine)[0] == {"choice0": 33}
    chunks, news = step(engine)
    assert chunks == {"choice0": 1, "choice1": 1, "choice2": 1, "choice3": 1}
    assert news["choice3"].cached_tokens == 32
    assert engine.stats().prefix_hits == 96


def test_without_prefix_cache_choices_do_not_wait_for_each_other() -> None:
    engine = scheduler(tokens=64, prefix_cache=False)
    engine.add(submit("a", 20))
    engine.add(submit("b", 20))
    assert step(engine)[0] == {"a": 20, "b": 20}


def test_a_cancelled_sequence_is_gone_at_once() -> None:
    engine = scheduler(tokens=8)
    engine.add(submit("prefilling", 30))
    engine.add(submit("waiting", 30, first=200))
    step(engine)
    assert engine.stats().kv_usage > 0
    engine.cancel("prefilling")
    engine.cancel("waiting")
    engine.cancel("never heard of")
    engine.check_integrity()
    assert engine.stats().kv_usage == 0.0
    _, news = step(engine)
    assert {n.sequence_id: n.finish_reason for n in news.values()} == {
        "prefilling": "cancelled",
        "waiting": "cancelled",
    }
    assert not engine.has_work


@pytest.mark.parametrize(
    ("params", "token", "reason", "stop_id", "n_tokens"),
    [
        (SamplingParams(max_tokens=3), EOS, "stop", EOS, 1),
        (SamplingParams(max_tokens=3, ignore_eos=True), EOS, "length", None, 3),
        (SamplingParams(max_tokens=3, stop_token_ids=(TOKEN,)), TOKEN, "stop", TOKEN, 1),
        (SamplingParams(stop_token_ids=(EOS,), ignore_eos=True), EOS, "stop", EOS, 1),
        (SamplingParams(max_tokens=1), TOKEN, "length", None, 1),
        (SamplingParams(), TOKEN, "length", None, CONTEXT - 4),
    ],
)
def test_why_a_sequence_ends(
    params: SamplingParams, token: int, reason: str, stop_id: int | None, n_tokens: int
) -> None:
    engine = scheduler()
    engine.add(submit("a", 4, params=params))
    tokens: list[int] = []
    while engine.has_work:
        _, news = step(engine, lambda _: token)
        tokens += news["a"].tokens
    assert tokens == [token] * n_tokens
    assert news["a"].finish_reason == reason
    assert news["a"].stop_id == stop_id
    assert engine.stats().kv_usage == 0.0


def test_a_numerical_error_ends_one_sequence_and_no_other() -> None:
    engine = scheduler()
    engine.add(submit("bad", 4))
    engine.add(submit("good", 4, first=200, max_tokens=2))
    _, news = step(engine, lambda name: NUMERICAL_ERROR if name == "bad" else TOKEN)
    assert news["bad"].finish_reason == "error"
    assert "not numbers" in (news["bad"].error or "")
    assert finish(engine)["good"].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (submit("a", CONTEXT), "exceeds the context window"),
        (submit("a", 0), "no tokens"),
        (submit("a", 4, first=998), "outside 0..999"),
        (submit("a", 4, first=-1), "outside 0..999"),
        (submit("a", 4, params=SamplingParams(logit_bias={1000: 1.0})), "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_answered_with_an_error(request_: Submit, says: str) -> None:
    engine = scheduler()
    engine.add(request_)
    assert engine.has_work
    chunks, news = step(engine)
    assert chunks == {}
    assert news["a"].finish_reason == "error"
    assert says in (news["a"].error or "")
    assert not engine.has_work


def test_the_same_id_twice_is_a_programming_error() -> None:
    engine = scheduler()
    engine.add(submit("a", 4))
    with pytest.raises(ValueError, match="exists already"):
        engine.add(submit("a", 4))


def test_prompt_logits_come_in_order_within_the_row_budget() -> None:
    engine = scheduler(tokens=16, rows=6)
    engine.add(submit("chat", 3, first=300))
    step(engine)
    engine.add(submit("echo", 20, prompt_logits=True))
    rows = []
    while engine.stats().steps < 2 or engine.stats().running > 1:
        plan = engine.schedule()
        rows += [c.rows for c in plan.chunks if c.sequence.id == "echo"]
        assert sum(c.rows for c in plan.chunks) <= 6
        engine.update(StepResult(plan, tuple(ChunkResult(TOKEN) for _ in plan.chunks)))
    assert rows == [5, 5, 5, 5]
    engine.add(submit("again", 20, prompt_logits=True))
    assert step(engine)[0]["again"] == 5, "cached tokens have no logits: all are computed"


def test_a_whole_context_of_prompt_logits_is_fine() -> None:
    engine = scheduler(rows=64, tokens=64)
    engine.add(submit("echo", CONTEXT, prompt_logits=True))
    assert step(engine)[1]["echo"].finish_reason == "length"
