"""Scheduler, runner and a device with real block tables, put together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from localllm.backends.base import Batch
from localllm.engine.core import EngineCore
from localllm.engine.messages import Submit
from localllm.errors import DeviceOutOfMemoryError
from localllm.sampling_params import SamplingParams
from tests.engine.fakes import CONTEXT, VOCAB, expected_row, fake_core, run, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=25)


def prompts(n: int) -> list[tuple[int, ...]]:
    """Of mixed length; some begin alike."""
    draw = random.Random(7)
    common = tuple(draw.randrange(VOCAB) for _ in range(70))
    return [
        (*common[: draw.choice([0, 40, 70])], *(draw.randrange(VOCAB) for _ in range(1 + i * 3)))
        for i in range(n)
    ]


def submit(name: str, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> Submit:
    return Submit(name, prompt, params, eos_ids=frozenset([0]))


@cache
def answers_alone(windows: tuple[int | None, ...]) -> dict[str, list[int]]:
    core = fake_core(windows, prefix_cache=False)
    requests = [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(16))]
    return {r.sequence_id: tokens_of(run(core, r)[r.sequence_id]) for r in requests}


@pytest.mark.parametrize("windows", [(None,), (None, 24), (40,), (9, None)])
@pytest.mark.parametrize(
    "make",
    [
        lambda windows: fake_core(windows),
        lambda windows: fake_core(windows, tokens=48),
        lambda windows: fake_core(windows, tokens=5),
        lambda windows: fake_core(windows, spare_blocks=2),
        lambda windows: fake_core(windows, spare_blocks=2, prefix_cache=False),
    ],
    ids=["roomy", "budget of 48", "budget of 5", "small pool", "small pool without cache"],
)
def test_company_chunks_cache_and_preemption_change_no_answer(
    windows: tuple[int | None, ...], make: Callable[[tuple[int | None, ...]], EngineCore]
) -> None:
    requests = [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(16))]
    alone = answers_alone(windows)
    core = make(windows)
    for _ in range(2):  # the second time from a warm cache, if there is one
        together = run(core, *requests)
        assert {name: tokens_of(news) for name, news in together.items()} == alone
    assert all(alone.values())
    assert core.stats.kv_usage == 0.0


def test_a_small_pool_does_preempt() -> None:
    core = fake_core(spare_blocks=2)
    run(core, *(submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(16))))
    assert core.stats.alloc_failures >= core.stats.preemptions > 0


def short_of_memory(core: EngineCore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The device then finds, when it has stored what is new, no memory for over `most` tokens."""
    step = core._runner._step
    submit_one = step.submit

    def submit_some(batch: Batch) -> None:
        submit_one(batch)
        if batch.ids.size > most:
            raise DeviceOutOfMemoryError("no 2.00 GiB left")

    monkeypatch.setattr(step, "submit", submit_some)


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
def test_a_device_without_memory_takes_fewer_sequences_a_step(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(16))]
    core = fake_core(windows, tokens=20)
    short_of_memory(core, monkeypatch, most=20 - 3)
    for request in requests:
        core.add(request)
    answers: dict[str, list[int]] = {request.sequence_id: [] for request in requests}
    errors: set[str | None] = set()
    while core.has_work:
        for one in core.step().news:
            answers[one.sequence_id] += one.tokens
            errors.add(one.error)
        core.check_integrity()
    assert core.stats.preemptions > 0
    assert errors == {None, "the device is out of memory: no 2.00 GiB left"}
    whole = answers_alone(windows)
    served = {name: answer for name, answer in answers.items() if answer}
    assert served == {name: whole[name] for name in served}
    assert len(served) > 8


def test_a_step_of_one_sequence_that_finds_no_memory_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = fake_core(tokens=64)
    short_of_memory(core, monkeypatch, most=40)
    news = run(core, submit("long", tuple(range(2, 48))), submit("short", (5, 6)))
    assert [(one.finish_reason, one.error) for one in news["long"]] == [
        ("error", "the device is out of memory: no 2.00 GiB left")
    ]
    assert news["short"][-1].error is None
    assert tokens_of(news["short"]) == tokens_of(run(fake_core(), submit("a", (5, 6)))["a"])
    core.check_integrity()


def test_a_second_turn_finds_the_first_one_in_window_groups_too() -> None:
    core = fake_core((None, 24))
    first = prompts(16)[15]
    answer = tokens_of(run(core, submit("first", first))["first"])
    second = (*first, *answer, 1, 2, 3)
    news = run(core, submit("second", second))["second"]
    computed = len(first) + len(answer) - 1  # the last token is known but was never computed
    assert news[0].cached_tokens == computed // 16 * 16


def test_prompt_logits_are_those_of_every_position_in_order() -> None:
    prompt = prompts(16)[12]
    core = fake_core(tokens=16, rows=6)
    run(core, submit("warms the cache", prompt))
    request = Submit("l", prompt, GREEDY, frozenset(), prompt_logits=True)
    news = run(core, request, submit("beside", prompt[::-1]))["l"]
    logits = np.concatenate([one.logits for one in news if one.logits is not None])
    expected = [expected_row(prompt[: i + 1]) for i in range(len(prompt))]
    np.testing.assert_array_equal(logits, expected)
    assert news[-1].finish_reason == "length"


def test_without_a_seed_one_is_drawn_and_a_given_one_is_kept() -> None:
    core = fake_core()
    step = core._runner._step
    run(core, submit("a", (1,), SamplingParams(max_tokens=1)))
    drawn = step.batch.sampling.seed  # type: ignore[attr-defined]
    run(core, submit("b", (1,), SamplingParams(max_tokens=1)))
    assert step.batch.sampling.seed != drawn  # type: ignore[attr-defined]
    run(core, submit("c", (1,), SamplingParams(max_tokens=1, seed=2**64 - 1)))
    assert step.batch.sampling.seed.tolist() == [2**64 - 1]  # type: ignore[attr-defined]


def test_what_cannot_be_served_is_answered_and_harms_nobody() -> None:
    core = fake_core()
    news = run(core, submit("bad", (VOCAB,)), submit("long", (1,) * CONTEXT), submit("good", (1,)))
    assert news["bad"][0].finish_reason == news["long"][0].finish_reason == "error"
    assert tokens_of(news["good"])


def test_sequences_are_dated_by_their_first_step() -> None:
    """Also when that step, the first of a long prompt, brings no token."""
    core = fake_core((None,), tokens=32)
    before = time.monotonic()
    core.add(submit("long", tuple(1 + i % (VOCAB - 1) for i in range(80))))
    core.add(submit("short", (1, 2, 3)))
    news = [one for _ in range(4) for one in core.step().news]
    long = [one for one in news if one.sequence_id == "long"]
    assert long[0].tokens == ()
    assert long[0].started is not None
    assert long[0].started >= before
    assert {one.started for one in long} == {long[0].started}
    first_short = next(one for one in news if one.sequence_id == "short")
    assert first_short.tokens
    assert first_short.started is not None
    assert long[0].started == first_short.started  # it left room for the short one


def test_stats_tell_what_steps_took() -> None:
    core = fake_core((None,), tokens=32)
    core.add(submit("a", tuple(1 + i % (VOCAB - 1) for i in range(80))))
    for _ in range(3):
        core.step()
    stats = core.stats
    assert sum(stats.step_tokens.counts) == stats.steps == 3
    assert stats.step_tokens.total == 80
    assert [name for name, _ in stats.step_seconds] == ["schedule", "run", "update"]
    assert all(sum(tally.counts) == 3 and tally.total > 0 for _, tally in stats.step_seconds)


def submitted(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each batch that the device gets."""
    step, sizes = core._runner._step, list[int]()
    submit_one = step.submit

    def submit_and_count(batch: Batch) -> None:
        sizes.append(batch.ids.size)
        submit_one(batch)

    monkeypatch.setattr(step, "submit", submit_and_count)
    return sizes


def test_the_device_has_begun_a_plain_step_before_the_news_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = fake_core()
    sizes = submitted(core, monkeypatch)
    core.add(submit("a", (5, 6), replace(GREEDY, ignore_eos=True)))
    core.step()
    assert sizes == [2, 1]
    core.step(lambda: True)
    assert sizes == [2, 1], "the caller has something else first"
    core.step()
    assert sizes == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, min_tokens=5, max_tokens=5),
    ],
    ids=["its last token", "a penalty", "logprobs", "a restriction"],
)
def test_what_hangs_on_the_token_is_not_begun_without_it(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = fake_core()
    sizes = submitted(core, monkeypatch)
    core.add(submit("a", (5, 6), params))
    while not sizes:
        core.step()
    assert sizes == [2]


def test_a_cancel_waits_for_the_step_that_the_device_has_begun() -> None:
    core = fake_core()
    core.add(submit("a", (5, 6), replace(GREEDY, ignore_eos=True)))
    core.add(submit("b", (7,), replace(GREEDY, ignore_eos=True)))
    core.step()
    used = core.stats.kv_usage
    core.cancel("a")
    core.check_integrity()
    assert core.stats.kv_usage == used
    assert {one.sequence_id for one in core.step().news} == {"a", "b"}
    assert core.stats.kv_usage < used
    news = core.step().news
    assert [one.sequence_id for one in news if one.finish_reason == "cancelled"] == ["a"]
    core.cancel("b")
    while core.has_work:
        core.step()
        core.check_integrity()
    assert core.stats.kv_usage == 0.0


@pytest.mark.parametrize("windows", [(None,), (9, None)])
@pytest.mark.parametrize("spare_blocks", [2, 100])
@pytest.mark.parametrize("seed", range(4))
def test_who_comes_and_goes_changes_no_answer(
    windows: tuple[int | None, ...], spare_blocks: int, seed: int
) -> None:
    draw = random.Random(seed)
    requests = [submit(f"s{i}", prompt) for i, prompt in enumerate(prompts(16))]
    core = fake_core(windows, spare_blocks=spare_blocks)
    answers: dict[str, list[int]] = {}
    cancelled = set()
    while core.has_work or requests:
        if requests and draw.random() < 0.3:
            request = requests.pop()
            answers[request.sequence_id] = []
            core.add(request)
        if answers and draw.random() < 0.1:
            cancelled.add(name := draw.choice(list(answers)))
            core.cancel(name)
        for one in core.step(lambda: draw.random() < 0.2).news:
            answers[one.sequence_id] += one.tokens
        core.check_integrity()
    whole = answers_alone(windows)
    for name, answer in answers.items():
        assert answer == whole[name][: len(answer)]
        assert name in cancelled or answer == whole[name]
    assert core.stats.kv_usage == 0.0


def test_an_engine_closes_with_a_step_begun() -> None:
    core = fake_core()
    core.add(submit("a", (5, 6), replace(GREEDY, ignore_eos=True)))
    core.step()
    core.close()


def test_a_newcomer_waits_for_no_more_than_the_step_that_has_begun() -> None:
    core = fake_core()
    core.add(submit("a", (5, 6), replace(GREEDY, ignore_eos=True)))
    core.step()
    core.add(submit("b", (7,)))
    assert {one.sequence_id for one in core.step().news} == {"a"}
    assert {one.sequence_id for one in core.step().news} == {"a", "b"}
