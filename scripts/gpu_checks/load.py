"""Batches as an engine makes them: prompts, then one token for each sequence and step."""

from __future__ import annotations

import numpy as np

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, SamplingArrays, Step


class Load:
    """`count` sequences of up to `context` positions, each in blocks of its own after block 0."""

    def __init__(self, step: Step, count: int, context: int, vocab: int) -> None:
        self.step = step
        self.vocab = vocab
        per_sequence = blocks_for(1, context) - 1
        blocks = np.arange(1, 1 + count * per_sequence, dtype=np.int32)
        self.tables = blocks.reshape(count, per_sequence)
        self.length = 0  # of every sequence
        self.tokens = np.zeros(count, np.int32)
        self.random = np.random.default_rng(count)

    def prompt(self, tokens: int) -> None:
        """From an empty cache, all prompts in one step."""
        self.length = 0
        ids = self.random.integers(0, self.vocab, len(self.tables) * tokens)
        self._run(ids.astype(np.int32), tokens)

    def decode(self) -> None:
        """One step; what it gives goes into the next."""
        self._run(self.tokens, 1)

    def _run(self, ids: Int32Array, new: int) -> None:
        count = len(self.tables)
        own = np.arange(self.length, self.length + new, dtype=np.int32)
        slots = self.tables[:, own // BLOCK_TOKENS] * BLOCK_TOKENS + own % BLOCK_TOKENS
        self.length += new
        ends = np.arange(new, count * new + 1, new, dtype=np.int32)
        batch = Batch(
            ids=ids,
            positions=np.tile(own, count),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            seq_lens=np.full(count, self.length, np.int32),
            slots=np.ascontiguousarray(slots.reshape(1, -1)),
            block_tables=self.tables[None],
            logit_rows=ends - 1,
            sampling=SamplingArrays.greedy(count),
        )
        self.step.submit(batch)
        self.tokens = self.step.collect()


def blocks_for(count: int, context: int) -> int:
    """Of a cache that such sequences fit in."""
    return 1 + count * -(-context // BLOCK_TOKENS)
