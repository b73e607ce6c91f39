"""From a plan to the arrays that a backend takes: Python that every step pays for."""

from __future__ import annotations

import numpy as np

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, StepLimits, mask_words
from localllm.engine.kv_manager import NO_BLOCK
from localllm.engine.sampling_rows import SamplingRows
from localllm.engine.sequence import Plan, Sequence


class BatchBuilder:
    """Owns the arrays: a batch is valid until the next one is built."""

    def __init__(self, limits: StepLimits, n_groups: int, vocab: int) -> None:
        table = -(-limits.context // BLOCK_TOKENS)
        self._n_groups = n_groups
        self._count = np.arange(limits.tokens + 1, dtype=np.int32)
        self._ids = np.empty(limits.tokens, np.int32)
        self._query_start = np.zeros(limits.seqs + 1, np.int32)
        self._slots = np.empty(n_groups * limits.tokens, np.int32)
        self._tables = np.empty(n_groups * limits.seqs * table, np.int32)
        self._sampling = SamplingRows(mask_words(vocab))

    def build(self, plan: Plan) -> Batch:
        chunks = plan.chunks
        n_seqs = len(chunks)
        starts = np.fromiter((c.start for c in chunks), np.int32, n_seqs)
        ends = np.fromiter((c.end for c in chunks), np.int32, n_seqs)
        query_start = self._query_start[: n_seqs + 1]
        np.cumsum(ends - starts, out=query_start[1:])
        n_tokens = int(query_start[-1])
        owner = np.repeat(self._count[:n_seqs], ends - starts)
        positions = self._count[:n_tokens] + (starts - query_start[:-1])[owner]
        tables = self._block_tables(plan)
        slots = self._slots[: self._n_groups * n_tokens].reshape(self._n_groups, n_tokens)
        for g in range(self._n_groups):
            slots[g] = tables[g, owner, positions // BLOCK_TOKENS] * BLOCK_TOKENS
        slots += positions % BLOCK_TOKENS
        return Batch(
            ids=self._token_ids(plan, query_start.tolist()),
            positions=positions,
            query_start=query_start,
            seq_lens=ends,
            slots=slots,
            block_tables=tables,
            logit_rows=self._logit_rows(plan, query_start),
            sampling=self._sampling.arrays(_drawing(plan)),
        )

    def advance(self, before: Batch, plan: Plan) -> Batch:
        """For a plan of one token after those of each sequence of `before`, a batch that another
        builder owns. The tokens are still to come, into `ids`."""
        n = len(plan.chunks)
        positions = before.seq_lens
        query_start = self._query_start[: n + 1]
        query_start[:] = self._count[: n + 1]
        tables = self._block_tables(plan)
        slots = self._slots[: self._n_groups * n].reshape(self._n_groups, n)
        slots[:] = tables[:, self._count[:n], positions // BLOCK_TOKENS] * BLOCK_TOKENS
        slots += positions % BLOCK_TOKENS
        return Batch(
            ids=self._ids[:n],
            positions=positions,
            query_start=query_start,
            seq_lens=positions + 1,
            slots=slots,
            block_tables=tables,
            logit_rows=self._count[:n],
            sampling=self._sampling.arrays([c.sequence for c in plan.chunks], ahead=1),
        )

    def fill_masks(self) -> None:
        """Completes the batch; see `SamplingArrays`."""
        self._sampling.fill_masks()

    def _token_ids(self, plan: Plan, query_start: list[int]) -> Int32Array:
        ids = self._ids[: query_start[-1]]
        for chunk, at in zip(plan.chunks, query_start, strict=False):
            start, end = chunk.start, chunk.end
            if end - start == 1:
                ids[at] = chunk.sequence.tokens[start]
            else:
                ids[at : at + end - start] = chunk.sequence.tokens[start:end]
        return ids

    def _block_tables(self, plan: Plan) -> Int32Array:
        """[G, S, B], padded with NO_BLOCK."""
        tables = [c.sequence.blocks.tables for c in plan.chunks]
        width = max(len(groups[0]) for groups in tables)
        shape = (self._n_groups, len(tables), width)
        out = self._tables[: shape[0] * shape[1] * shape[2]].reshape(shape)
        out.fill(NO_BLOCK)
        for s, groups in enumerate(tables):
            for g, table in enumerate(groups):
                out[g, s, : len(table)] = table
        return out

    def _logit_rows(self, plan: Plan, query_start: Int32Array) -> Int32Array:
        rows = np.fromiter((c.rows for c in plan.chunks), np.int32, len(plan.chunks))
        last = np.cumsum(rows, dtype=np.int32)
        # row i of a chunk whose rows end before number `last` is that far from the chunk's end
        offset = np.repeat(query_start[1:] - last, rows)
        return self._count[: len(offset)] + offset


def _drawing(plan: Plan) -> list[Sequence | None]:
    """Who draws a token from each logit row; None for rows whose logits alone are wanted."""
    rows: list[Sequence | None] = []
    for chunk in plan.chunks:
        if chunk.rows == 1 and chunk.sequence.prompt_rows == 0:
            rows.append(chunk.sequence)
        elif chunk.rows:
            rows += [None] * chunk.prompt_rows
            if chunk.samples:
                rows.append(chunk.sequence)
    return rows
