"""Decides what each step computes. Pure bookkeeping: no tensors, no clocks, no threads.

There is no prefill and no decode: a sequence has known tokens and computed tokens, and each step
moves some of them closer. Chunked prefill, prefix hits and recomputation after a preemption are
the same case.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from localllm.engine.admission import Admission
from localllm.engine.block_pool import BlockKey
from localllm.engine.kv_manager import Growth, KVManager, Prefix
from localllm.engine.messages import EngineStats, FinishReason, SequenceNews, Submit
from localllm.engine.sequence import (
    NUMERICAL_ERROR,
    Chunk,
    ChunkResult,
    Plan,
    Sequence,
    StepResult,
)
from localllm.errors import RequestError


@dataclass(frozen=True)
class StepBudget:
    """The most that one step takes."""

    tokens: int
    seqs: int
    logit_rows: int


class Scheduler:
    """Running sequences go first, then waiting ones, each by (priority, arrival).

    When the pool is full the last of the running ones gives up its blocks and waits again, so the
    first always makes progress. `add`, `cancel`, `schedule` and `update` are called in turn by one
    thread; between a plan and its `update` nothing else is but `shrink`, `foresee` and `add`.
    """

    def __init__(self, kv: KVManager, budget: StepBudget, admission: Admission) -> None:
        self.kv = kv
        self._budget = budget
        self.admission = admission
        self._arrivals = count()
        self._running: list[Sequence] = []  # both sorted by Sequence.order
        self._waiting: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._notices: list[SequenceNews] = []  # news that no step brought
        self._counts = _Counts()

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._notices)

    def add(self, request: Submit) -> Sequence | None:
        """A request that cannot be served is answered with an error in the next news."""
        try:
            if request.sequence_id in self._by_id:
                raise ValueError(f"sequence {request.sequence_id!r} exists already")
            self.admission.check(request)
        except RequestError as error:
            self.tell(SequenceNews(request.sequence_id, finish_reason="error", error=str(error)))
            return None
        blocks = self.kv.new_sequence(request.cache_salt)
        sequence = Sequence(request, next(self._arrivals), blocks)
        self._by_id[sequence.id] = sequence
        insort(self._waiting, sequence, key=_order)
        return sequence

    def tell(self, news: SequenceNews) -> None:
        """Brings news of a request that is not, or no longer, scheduled."""
        self._notices.append(news)

    def cancel(self, sequence_id: str) -> None:
        """Frees the sequence's memory now. One that is unknown has ended already."""
        if sequence := self._by_id.get(sequence_id):
            self._drop(sequence)
            self.tell(SequenceNews(sequence_id, finish_reason="cancelled"))

    def schedule(self) -> Plan:
        seats = self._budget.seqs - len(self._running)
        step = _Step(self._budget, self._running, min(len(self._waiting), seats))
        preemptions = self._counts.preemptions
        self._schedule_running(step)
        if self._waiting and self._counts.preemptions == preemptions:
            self._schedule_waiting(step)
        return Plan(tuple(step.chunks))

    def foresee(self, plan: Plan) -> Plan | None:
        """What follows the plan, if every sequence draws a token that does not end it.

        None where more than these tokens decides what follows. For the caller to run once `holds`
        says that it came so, in place of what `schedule` would plan after the update.
        """
        chunks = plan.chunks
        if self._waiting or not chunks or len(chunks) != len(self._running):
            return None
        context = self.admission.context
        if not all(c.samples and c.sequence.draws_after_next(context) for c in chunks):
            return None
        if not self.kv.grow_all([(c.sequence.blocks, c.end + 1) for c in chunks]):
            return None
        return Plan(tuple(Chunk(c.sequence, c.end, c.end + 1, 1) for c in chunks))

    def holds(self, plan: Plan, tokens: Iterable[int]) -> bool:
        """Whether what `foresee` said of a plan is true, given the token of each chunk."""
        return not self._waiting and not any(
            token == NUMERICAL_ERROR or chunk.sequence.stops_at(token)
            for chunk, token in zip(plan.chunks, tokens, strict=True)
        )

    def shrink(self, plan: Plan, reason: str) -> Plan:
        """A plan that takes less of the device's memory, which did not hold this one's step.

        The last of its sequences gives up its blocks and waits again; one that is alone ends with
        the reason as its error.
        """
        last = max((chunk.sequence for chunk in plan.chunks), key=_order)
        if len(plan.chunks) == 1:
            self._drop(last)
            self.tell(SequenceNews(last.id, finish_reason="error", error=reason))
        else:
            self._running.remove(last)
            self._preempt(last)
        return Plan(tuple(chunk for chunk in plan.chunks if chunk.sequence is not last))

    def update(self, result: StepResult) -> list[SequenceNews]:
        """Books what a step computed; what has finished has freed its memory on return."""
        news, self._notices = self._notices, []
        for chunk, outcome in zip(result.plan.chunks, result.chunks, strict=True):
            if (one := self._update_one(chunk, outcome)) is not None:
                news.append(one)
        self._counts.steps += bool(result.chunks)
        return news

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=self.kv.usage(),
            preemptions=counts.preemptions,
            steps=counts.steps,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            alloc_failures=self.kv.failures,
            evictions=self.kv.evictions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and every sequence is accounted for."""
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert len(self._running) <= self._budget.seqs
        members = [s.id for s in (*self._running, *self._waiting)]
        assert sorted(members) == sorted(self._by_id), "a sequence is lost or queued twice"
        for sequence in self._waiting:
            assert sequence.computed == 0, "a waiting sequence counts computed tokens"
            assert not any(sequence.blocks.tables), "a waiting sequence holds blocks"
        for sequence in self._running:
            assert 0 <= sequence.computed < len(sequence.tokens)
        self.kv.check_integrity(s.blocks for s in self._running)

    def _schedule_running(self, step: _Step) -> None:
        i = 0
        while i < len(self._running) and step.tokens:
            sequence = self._running[i]
            step.passes(sequence)
            end = step.chunk_end(sequence)
            if end > sequence.computed and self._make_room(sequence, end):
                step.take(sequence, end)
            i += 1

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Preempts from the back until `end` tokens fit; False if the sequence itself had to go."""
        while not self.kv.grow(sequence.blocks, end):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence.blocks)
        sequence.computed = 0
        insort(self._waiting, sequence, key=_order)
        self._counts.preemptions += 1

    def _schedule_waiting(self, step: _Step) -> None:
        """Admits in order; one whose next block is computed in this very step waits to share it."""
        pending = {key for chunk in step.chunks for key in self._pending_keys(chunk)}
        i = 0
        while i < len(self._waiting) and step.tokens and len(self._running) < self._budget.seqs:
            sequence = self._waiting[i]
            prefix = self.kv.find_prefix(sequence.blocks, sequence.tokens, sequence.first_row)
            if prefix.missing in pending:
                i += 1
                continue
            if not self._fits(sequence, prefix):
                break
            self._admit(self._waiting.pop(i), prefix)
            step.admits()
            end = step.chunk_end(sequence)
            if end > sequence.computed:
                grown = self.kv.grow(sequence.blocks, end)
                assert grown, "an admitted sequence has room for its first chunk"
                pending.update(self._pending_keys(step.take(sequence, end)))

    def _fits(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether all its known tokens fit, with a block to spare for each that runs already."""
        spare = self.kv.block_tokens
        running = (Growth(s.blocks, len(s.tokens) + spare, s.remaining) for s in self._running)
        return self.kv.can_admit(prefix, len(sequence.tokens), self._budget.tokens, running)

    def _admit(self, sequence: Sequence, prefix: Prefix) -> None:
        self.kv.admit(sequence.blocks, prefix)
        sequence.computed = prefix.tokens
        insort(self._running, sequence, key=_order)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = prefix.tokens
            self._counts.prefix_queries += len(sequence.tokens)
            self._counts.prefix_hits += prefix.tokens

    def _pending_keys(self, chunk: Chunk) -> Iterable[BlockKey]:
        return self.kv.pending_keys(chunk.sequence.blocks, chunk.sequence.tokens, chunk.end)

    def _update_one(self, chunk: Chunk, outcome: ChunkResult) -> SequenceNews | None:
        sequence = chunk.sequence
        if outcome.token == NUMERICAL_ERROR:
            self._drop(sequence)
            message = outcome.error or "the model computed values that are not numbers"
            return SequenceNews(
                sequence.id,
                finish_reason="error",
                error=message,
                refused=outcome.error is not None,
            )
        sequence.computed = chunk.end
        self.kv.commit(sequence.blocks, sequence.tokens, chunk.end)
        n_prompt = len(sequence.request.prompt)
        self._counts.prompt_tokens += max(0, min(chunk.end, n_prompt) - chunk.start)
        if chunk.rows == 0:
            return None
        if sequence.prompt_rows == 0:
            return self._token_news(sequence, outcome)
        sequence.rows_sent += chunk.prompt_rows
        if sequence.ends_with_prompt:
            return self._prompt_news(sequence, outcome)
        if not chunk.samples:
            return SequenceNews(
                sequence.id,
                cached_tokens=sequence.cached_tokens or 0,
                started=sequence.started,
                prompt_logprobs=outcome.prompt_logprobs,
            )
        return self._token_news(sequence, outcome)

    def _token_news(self, sequence: Sequence, outcome: ChunkResult) -> SequenceNews:
        token = outcome.token
        assert token is not None
        self._counts.generated_tokens += 1
        reason = sequence.append(token, self.admission.context)
        stop_id = token if reason == "stop" else None
        if outcome.ended:
            reason = "stop"
        if reason is not None:
            self._drop(sequence)
        return SequenceNews(
            sequence.id,
            tokens=(token,),
            finish_reason=reason,
            stop_id=stop_id,
            cached_tokens=sequence.cached_tokens or 0,
            started=sequence.started,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
        )

    def _prompt_news(self, sequence: Sequence, outcome: ChunkResult) -> SequenceNews:
        """Of a sequence that generates nothing."""
        reason: FinishReason | None = None if sequence.owes_rows else "length"
        if reason:
            self._drop(sequence)
        return SequenceNews(
            sequence.id,
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            started=sequence.started,
            logits=outcome.logits,
            prompt_logprobs=outcome.prompt_logprobs,
        )

    def _drop(self, sequence: Sequence) -> None:
        self.kv.release(sequence.blocks)
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        del self._by_id[sequence.id]


class _Step:
    """What is left of one step's budget while it is planned."""

    def __init__(self, budget: StepBudget, running: list[Sequence], waiting: int) -> None:
        """`waiting`: how many more may be admitted."""
        self.tokens = budget.tokens
        self.rows = budget.logit_rows
        self.followers = len(running)  # running sequences that have not had their turn
        self.decoding = sum(s.remaining == 1 for s in running)  # of these, with one token to go
        self.reading = len(running) - self.decoding + waiting  # with more, or not admitted yet
        self.chunks: list[Chunk] = []

    def passes(self, sequence: Sequence) -> None:
        """It is this running sequence's turn."""
        self.followers -= 1
        self.decoding -= sequence.remaining == 1
        self.reading -= sequence.remaining != 1

    def admits(self) -> None:
        """It is the turn of the next one that waits."""
        self.reading -= 1

    def chunk_end(self, sequence: Sequence) -> int:
        """How far the sequence may go.

        A long chunk leaves a token to each that needs just one, and a quarter of the rest where
        others have something to read: a short prompt does not wait for the end of a long one.
        """
        remaining, room = sequence.remaining, self.tokens
        if remaining > 1:
            room -= self.decoding
            room -= room // 4 if self.reading > 0 else 0
        n = min(remaining, max(1, room))
        if sequence.owes_rows:
            unasked = sequence.rows_sent - sequence.computed
            n = min(n, unasked + min(self.rows, max(1, self.rows - self.followers)))
        elif n == remaining and self.rows == 0:
            n -= 1
        return sequence.computed + n

    def take(self, sequence: Sequence, end: int) -> Chunk:
        if sequence.owes_rows:
            rows = max(0, end - sequence.rows_sent)
        else:
            rows = int(end == len(sequence.tokens))
        chunk = Chunk(sequence, sequence.computed, end, rows)
        self.tokens -= end - sequence.computed
        self.rows -= rows
        self.chunks.append(chunk)
        return chunk


@dataclass
class _Counts:
    """Totals since start."""

    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
