"""A device whose model answers by a hash of all that a token sees through its block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, StepLimits
from localllm.backends.program import FloatArray
from localllm.backends.reference.sampling import sample
from localllm.engine.admission import Admission
from localllm.engine.core import EngineCore
from localllm.engine.kv_manager import KVManager, most_blocks
from localllm.engine.messages import Ready, SequenceNews, Submit
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduler, StepBudget
from localllm.engine.vocabulary import Vocabulary
from localllm.text.tokenizer import Tokenizer

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
WORDS = ["<end>", "</think>", *_LETTERS, *" \n-.", "ab", "bc", "the", "cab", "12", " a", "--", "?!"]
VOCAB = 50
assert len(WORDS) == VOCAB
CONTEXT = 200


class FakeStep:
    """Implements `backends.base.Step`. The last batch stays in `batch` for tests to look at."""

    def __init__(self, windows: Sequence[int | None], n_blocks: Sequence[int]) -> None:
        self._windows = windows
        self._slots = [np.full(n * BLOCK_TOKENS, -1, np.int64) for n in n_blocks]
        self._logits: FloatArray = np.empty((0, VOCAB), np.float32)

    def warmup(self) -> None:
        pass

    def submit(self, batch: Batch) -> None:
        self.batch = batch
        for slots, content in zip(batch.slots, self._slots, strict=True):
            content[slots] = batch.ids
        owner = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
        rows = [self._row(batch, int(owner[t]), int(t)) for t in batch.logit_rows]
        self._logits = np.array(rows, np.float32).reshape(-1, VOCAB)

    def collect(self) -> Int32Array:
        return sample(self._logits, self.batch.sampling)

    def logits(self) -> FloatArray:
        return self._logits

    def trace(self, batch: Batch) -> list[FloatArray]:
        raise NotImplementedError

    def _row(self, batch: Batch, sequence: int, token: int) -> FloatArray:
        position = int(batch.positions[token])
        seen: list[int] = []
        for g, window in enumerate(self._windows):
            positions = np.arange(
                0 if window is None else max(0, position - window + 1), position + 1
            )
            blocks = batch.block_tables[g, sequence, positions // BLOCK_TOKENS]
            assert (blocks >= 0).all()
            seen += self._slots[g][blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS].tolist()
        return expected_row(seen)


def expected_row(seen: Sequence[int]) -> FloatArray:
    seed = abs(hash(tuple(seen)))
    return np.random.default_rng(seed).standard_normal(VOCAB, np.float32)


def fake_core(
    windows: Sequence[int | None] = (None,),
    *,
    tokens: int = 64,
    seqs: int = 8,
    rows: int = 16,
    spare_blocks: int = 100,
    prefix_cache: bool = True,
) -> EngineCore:
    """An engine around a FakeStep, with room for one whole context and `spare_blocks` more."""
    n_blocks = [most_blocks(w, CONTEXT, tokens, BLOCK_TOKENS) + spare_blocks for w in windows]
    kv = KVManager(windows, n_blocks, BLOCK_TOKENS, prefix_cache=prefix_cache)
    scheduler = Scheduler(kv, StepBudget(tokens, seqs, rows), Admission(CONTEXT, VOCAB))
    limits = StepLimits(tokens, seqs, rows, CONTEXT)
    runner = Runner(FakeStep(windows, n_blocks), limits, len(windows), VOCAB)
    ready = Ready("fake", "fake", "fake", 1, CONTEXT, VOCAB, tuple(n_blocks), 0, 0.0)
    return EngineCore(scheduler, runner, ready, fake_vocabulary(), lambda: None)


def fake_vocabulary() -> Vocabulary:
    """Token 0 ends, 1 is a control token; the others are WORDS."""
    return Vocabulary(lambda: cast(Tokenizer, _FakeTokenizer()), VOCAB)


class _FakeTokenizer:
    vocab_size = VOCAB
    eog_ids = frozenset([0])

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token].encode() if token > 1 else b""

    def token_text(self, token: int) -> str:
        return str(WORDS[token])

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        assert not add_special
        return [WORDS.index(letter) for letter in text]


def run(core: EngineCore, *requests: Submit) -> dict[str, list[SequenceNews]]:
    """All news of the requests, submitted together."""
    for request in requests:
        core.add(request)
    news: dict[str, list[SequenceNews]] = {request.sequence_id: [] for request in requests}
    while core.has_work:
        for one in core.step().news:
            news[one.sequence_id].append(one)
    return news


def tokens_of(news: Sequence[SequenceNews]) -> list[int]:
    return [token for one in news for token in one.tokens]
