"""Random traces against a model whose answers depend on every key and value that it may see.

The simulated cache holds, slot by slot, which salt and which tokens up to there were stored. A
sequence that would read anything but its own beginning is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from localllm.engine.admission import Admission
from localllm.engine.kv_manager import KVManager, most_blocks
from localllm.engine.messages import SequenceNews, Submit
from localllm.engine.scheduler import Scheduler, StepBudget
from localllm.engine.sequence import NUMERICAL_ERROR, Chunk, ChunkResult, Plan, StepResult
from localllm.sampling_params import SamplingParams

SIZE = 4
VOCAB = 5
CONTEXT = 40
EOS = 0


def next_token(salt: str, tokens: tuple[int, ...]) -> int:
    return hash((salt, tokens)) // 7 % VOCAB


def alone(request: Submit) -> tuple[list[int], str]:
    """The answer that the request gets from an idle engine."""
    tokens = list(request.prompt)
    limit = request.params.max_tokens or CONTEXT
    while True:
        token = next_token(request.cache_salt, tuple(tokens))
        tokens.append(token)
        answer = tokens[len(request.prompt) :]
        if token in request.eos_ids and not request.params.ignore_eos:
            return answer, "stop"
        if len(answer) == limit or len(tokens) == CONTEXT:
            return answer, "length"


class SimulatedCache:
    """Executes plans: stores the chunk's content, then checks what its tokens see."""

    def __init__(self, windows: list[int | None]) -> None:
        self._windows = windows
        self._slots: list[dict[int, tuple[str, tuple[int, ...]]]] = [{} for _ in windows]

    def run(self, plan: Plan) -> None:
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            for g in range(len(self._windows)):
                for position in range(chunk.start, chunk.end):
                    slot = self._slot(chunk, g, position)
                    assert (g, slot) not in written, "two tokens are stored in one slot"
                    written.add((g, slot))
                    self._slots[g][slot] = self._content(chunk, position)
        for chunk in plan.chunks:
            for g, window in enumerate(self._windows):
                first = 0 if window is None else max(0, chunk.start - window + 1)
                for position in range(first, chunk.end):
                    found = self._slots[g][self._slot(chunk, g, position)]
                    assert found == self._content(chunk, position), "another's cache is read"

    def _slot(self, chunk: Chunk, group: int, position: int) -> int:
        block = chunk.sequence.blocks.tables[group][position // SIZE]
        assert block >= 0
        return block * SIZE + position % SIZE

    def _content(self, chunk: Chunk, position: int) -> tuple[str, tuple[int, ...]]:
        sequence = chunk.sequence
        return sequence.request.cache_salt, tuple(sequence.tokens[: position + 1])


@dataclass
class Expected:
    request: Submit
    tokens: list[int]
    rows: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, cancels, steps and fails at random."""

    @initialize(
        windows=st.sampled_from([[None], [None, 6], [3], [9, None, 1]]),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        seqs=st.integers(1, 5),
        rows=st.integers(1, 6),
        spare=st.integers(0, 12),
        prefix_cache=st.booleans(),
    )
    def start(
        self,
        windows: list[int | None],
        budget: int,
        seqs: int,
        rows: int,
        spare: int,
        prefix_cache: bool,
    ) -> None:
        n_blocks = [most_blocks(w, CONTEXT, budget, SIZE) + spare for w in windows]
        self.kv = KVManager(windows, n_blocks, SIZE, prefix_cache=prefix_cache)
        self.limits = StepBudget(tokens=budget, seqs=seqs, logit_rows=rows)
        self.scheduler = Scheduler(self.kv, self.limits, Admission(CONTEXT, VOCAB))
        self.cache = SimulatedCache(windows)
        self.open: dict[str, Expected] = {}
        self.submitted = 0
        self.ahead: Plan | None = None

    @rule(
        beginning=st.sampled_from([(), (1, 2, 3, 4) * 3, (1, 2, 3, 4) * 8]),
        rest=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7),
        max_tokens=st.sampled_from([None, 1, 2, 9]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "other"]),
        prompt_logits=st.sampled_from([False, False, False, True]),
        copies=st.integers(1, 3),
    )
    def submit(
        self,
        beginning: tuple[int, ...],
        rest: list[int],
        max_tokens: int | None,
        ignore_eos: bool,
        priority: int,
        salt: str,
        prompt_logits: bool,
        copies: int,
    ) -> None:
        request = Submit(
            sequence_id="",
            prompt=(*beginning, *rest),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
            eos_ids=frozenset([EOS]),
            priority=priority,
            cache_salt=salt,
            prompt_logits=prompt_logits,
        )
        for _ in range(copies):
            named = replace(request, sequence_id=f"s{self.submitted}")
            self.submitted += 1
            self.open[named.sequence_id] = Expected(named, [])
            self.scheduler.add(named)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open and self.ahead is None:
            sequence_id = data.draw(st.sampled_from(sorted(self.open)))
            self.scheduler.cancel(sequence_id)
            self.scheduler.cancel("unknown")
            del self.open[sequence_id]

    @rule(fail=st.sampled_from([None, None, None, 0, 1]), look_ahead=st.booleans())
    def step(self, fail: int | None, look_ahead: bool) -> None:
        plan, self.ahead = self.ahead or self.scheduler.schedule(), None
        self._check_plan(plan)
        self.cache.run(plan)
        outcomes = [self._outcome(chunk) for chunk in plan.chunks]
        following = self.scheduler.foresee(plan) if look_ahead else None
        if fail is not None and fail < len(outcomes) and outcomes[fail].token is not None:
            outcomes[fail] = ChunkResult(token=NUMERICAL_ERROR)
        if following is not None:
            tokens = [one.token for one in outcomes if one.token is not None]
            if self.scheduler.holds(plan, tokens):
                self.ahead = following
        for news in self.scheduler.update(StepResult(plan, tuple(outcomes))):
            self._take(news)

    @rule()
    def several_steps(self) -> None:
        for _ in range(8):
            self.step(None, True)
            self.scheduler.check_integrity()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step(None, False)
            self.scheduler.check_integrity()
        assert not self.scheduler.has_work, "the scheduler starves a sequence"
        assert not self.open, "a sequence ended without news"
        assert self.kv.usage() == 0.0
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == 0

    def _check_plan(self, plan: Plan) -> None:
        stats = self.scheduler.stats()
        assert bool(plan.chunks) == (stats.running + stats.waiting > 0), "a step does nothing"
        assert sum(c.end - c.start for c in plan.chunks) <= self.limits.tokens
        assert sum(c.rows for c in plan.chunks) <= self.limits.logit_rows
        assert len(plan.chunks) <= self.limits.seqs
        for chunk in plan.chunks:
            assert chunk.start < chunk.end <= len(chunk.sequence.tokens)
            assert 0 <= chunk.rows <= chunk.end - chunk.start

    def _outcome(self, chunk: Chunk) -> ChunkResult:
        if not chunk.rows:
            return ChunkResult()
        request = chunk.sequence.request
        if request.prompt_logits:
            self.open[request.sequence_id].rows += chunk.rows
            return ChunkResult(token=1)
        return ChunkResult(next_token(request.cache_salt, tuple(chunk.sequence.tokens)))

    def _take(self, news: SequenceNews) -> None:
        if news.finish_reason == "cancelled":
            return
        expected = self.open[news.sequence_id]
        if news.finish_reason == "error":
            del self.open[news.sequence_id]
            return
        expected.tokens += news.tokens
        if news.finish_reason is None:
            return
        del self.open[news.sequence_id]
        if expected.request.prompt_logits:
            assert expected.rows == len(expected.request.prompt), "each row once"
        else:
            assert (expected.tokens, news.finish_reason) == alone(expected.request)
            assert news.stop_id == (EOS if news.finish_reason == "stop" else None)
            assert news.cached_tokens < len(expected.request.prompt)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
