"""Runs token lists through a backend by hand: no engine, no sampling, every row's logits.

For tests and tools. KV blocks are handed out in a scattered order, and those that a window has left
behind vanish from the tables, so that nothing comes right by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from localllm.backends.base import (
    BLOCK_TOKENS,
    Backend,
    Batch,
    Int32Array,
    SamplingArrays,
    StepLimits,
)
from localllm.backends.program import FloatArray, KVGroup, Program
from localllm.gguf import Tensor

Part = tuple[int, int, Sequence[int]]
"""A sequence's number, the position of its next token, and its tokens from there on."""


class DirectRunner:
    """Runs up to `max_seqs` sequences of up to `context` tokens at once, each from its start."""

    def __init__(
        self,
        backend: Backend,
        program: Program,
        tensors: Mapping[str, Tensor],
        *,
        context: int,
        max_seqs: int = 1,
        max_tokens: int = 512,
    ) -> None:
        self._groups = program.kv_groups
        per_seq = -(-context // BLOCK_TOKENS)
        n_blocks = per_seq * max_seqs + 1  # block 0 is the warm-up's
        self._tables = np.stack(
            [_scattered(seed, n_blocks, max_seqs, per_seq) for seed in range(len(self._groups))]
        )
        limits = StepLimits(max_tokens, max_seqs, max_tokens, context)
        kv = backend.alloc_kv(self._groups, [n_blocks] * len(self._groups))
        weights = backend.load(program, tensors, _ignore)
        self.step = backend.compile(program, weights, kv, limits, _ignore)
        self.step.warmup()

    def logits(self, *sequences: Sequence[int], chunk: int | Sequence[int]) -> list[FloatArray]:
        """Logits [tokens, vocab] of each sequence, computed in steps of `chunk` tokens of each."""
        rows: list[list[FloatArray]] = [[] for _ in sequences]
        for news in self.steps(*sequences, chunk=chunk):
            for number, logits in news.items():
                rows[number].append(logits.copy())
        return [np.concatenate(parts) for parts in rows]

    def steps(
        self, *sequences: Sequence[int], chunk: int | Sequence[int]
    ) -> Iterator[dict[int, FloatArray]]:
        """Step by step, the new logits by sequence number, valid until the next step."""
        chunks = [chunk] * len(sequences) if isinstance(chunk, int) else list(chunk)
        done = [0] * len(sequences)
        while parts := [
            (number, at, tokens[at : at + size])
            for number, (tokens, at, size) in enumerate(zip(sequences, done, chunks, strict=True))
            if at < len(tokens)
        ]:
            self.step.submit(self.batch(parts))
            self.step.collect()
            ends = np.cumsum([len(tokens) for _, _, tokens in parts])
            news = np.split(self.step.logits(), ends[:-1])
            yield {number: rows for (number, _, _), rows in zip(parts, news, strict=True)}
            for number, at, tokens in parts:
                done[number] = at + len(tokens)

    def batch(self, parts: Sequence[Part]) -> Batch:
        """A batch that asks for the logits of every token."""
        lengths = np.array([len(tokens) for _, _, tokens in parts])
        starts = np.array([start for _, start, _ in parts])
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        owners = np.repeat(np.arange(len(parts)), lengths)
        tables = self._tables[:, [number for number, _, _ in parts]]
        blocks = tables[:, owners, positions // BLOCK_TOKENS]
        n_tokens = len(positions)
        return Batch(
            ids=np.concatenate([tokens for _, _, tokens in parts]).astype(np.int32),
            positions=positions.astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            seq_lens=(starts + lengths).astype(np.int32),
            slots=(blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS).astype(np.int32, order="C"),
            block_tables=_without_left_behind(tables, self._groups, starts),
            logit_rows=np.arange(n_tokens, dtype=np.int32),
            sampling=SamplingArrays.greedy(n_tokens),
        )


def _scattered(seed: int, n_blocks: int, max_seqs: int, per_seq: int) -> Int32Array:
    order = np.random.default_rng(seed).permutation(np.arange(1, n_blocks))
    return order.reshape(max_seqs, per_seq).astype(np.int32)


def _without_left_behind(
    tables: Int32Array, groups: Sequence[KVGroup], starts: Int32Array
) -> Int32Array:
    """-1 for blocks whose last position is out of the window of each sequence's next token."""
    tables = np.ascontiguousarray(tables.copy())
    for table, group in zip(tables, groups, strict=True):
        if group.window is not None:
            for row, start in zip(table, starts, strict=True):
                row[: max(0, start - group.window + 1) // BLOCK_TOKENS] = -1
    return tables


def _ignore(_line: str) -> None:
    pass
