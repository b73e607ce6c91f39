"""What bench asks of an engine, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from localllm.cli.measure import Meter, Workload
from localllm.engine.messages import EngineStats, FinishReason, Ready, SequenceNews, Submit
from localllm.errors import EngineError

pytestmark = pytest.mark.anyio


class SteppingEngine:
    """A step takes two seconds of the clock that `perf_counter` shows; it starts one sequence at
    most, while fewer than `at_once` run, and gives each that runs a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_once: int = 100) -> None:
        self.ready: Ready | None = None
        self.healthy = True
        self.failed: str | None = None
        self.restarts = 0
        self.preemptions = 0
        self.submitted: list[Submit] = []
        self._at_once = at_once
        self._waiting: list[tuple[Submit, asyncio.Queue[SequenceNews]]] = []
        self._now = 0.0
        self._task: asyncio.Task[None] | None = None
        monkeypatch.setattr("localllm.cli.measure.time.perf_counter", lambda: self._now)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(preemptions=self.preemptions)

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceNews, None]:
        self.submitted.append(request)
        news: asyncio.Queue[SequenceNews] = asyncio.Queue()
        self._waiting.append((request, news))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        while True:
            item = await news.get()
            yield item
            if item.finish_reason:
                return

    async def _run(self) -> None:
        running: list[tuple[Submit, asyncio.Queue[SequenceNews], int]] = []
        while self._waiting or running:
            self._now += 2
            if self._waiting and len(running) < self._at_once:
                running.append((*self._waiting.pop(0), 0))
            for request, news, count in running:
                reason: FinishReason | None = None
                if count + 1 == request.params.max_tokens:
                    reason = "length"
                news.put_nowait(SequenceNews(request.sequence_id, (1,), reason))
            running = [(r, q, c + 1) for r, q, c in running if c + 1 != r.params.max_tokens]
            for _ in range(20):  # for the readers to look at the clock
                await asyncio.sleep(0)
        self._task = None

    async def start(self) -> Ready:
        raise NotImplementedError

    def cancel(self, sequence_id: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def test_prefill_is_the_prompt_over_the_time_to_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SteppingEngine(monkeypatch)
    speed = await Meter(engine, 50).prefill(Workload(prompt_tokens=100, gen_tokens=1))
    assert speed == 100 / 2
    (submit,) = engine.submitted
    assert len(submit.prompt) == 100
    assert submit.params.max_tokens == 1
    assert len(set(submit.prompt)) > 20
    assert all(0 <= token < 50 for token in submit.prompt)


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("depth", [0, 40])
async def test_decode_counts_only_steps_in_which_all_run(
    monkeypatch: pytest.MonkeyPatch, batch: int, depth: int
) -> None:
    engine = SteppingEngine(monkeypatch)
    work = Workload(prompt_tokens=9, gen_tokens=8, depth=depth, batch=batch)
    assert await Meter(engine, 50).decode(work) == batch / 2
    assert [len(submit.prompt) for submit in engine.submitted] == [max(depth, 1)] * batch
    assert all(submit.params.ignore_eos and not submit.eos_ids for submit in engine.submitted)
    assert all(len(s.prompt) + (s.params.max_tokens or 0) <= work.context for s in engine.submitted)


async def test_sequences_that_do_not_run_together_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Workload(prompt_tokens=9, gen_tokens=8, batch=3)
    with pytest.raises(EngineError, match="KV memory"):
        await Meter(SteppingEngine(monkeypatch, at_once=2), 50).decode(work)


async def test_answers_too_short_to_overlap_are_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Workload(prompt_tokens=1, gen_tokens=1, batch=9)  # more than the spare steps allow for
    with pytest.raises(EngineError, match="1 tokens to write are too few"):
        await Meter(SteppingEngine(monkeypatch), 50).decode(work)


async def test_prompts_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    for _ in range(2):
        engine = SteppingEngine(monkeypatch)
        meter = Meter(engine, 50)
        for _ in range(2):
            await meter.prefill(Workload(prompt_tokens=20, gen_tokens=1))
        prompts.append([submit.prompt for submit in engine.submitted])
    assert prompts[0] == prompts[1]
    assert prompts[0][0] != prompts[0][1]
