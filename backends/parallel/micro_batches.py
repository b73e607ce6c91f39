"""A batch in parts, so that one stage computes a part while the next has the part before.

Parts are runs of tokens. A sequence whose tokens are cut is in two parts: the later one finds the
keys and values of the earlier in the cache, as those of any earlier step. Answers do not depend on
the parts, as they do not depend on the batch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from localllm.backends.base import BLOCK_TOKENS, Batch, SamplingArrays

_MOST_PER_STAGE = 4  # parts; more of them shorten the wait at both ends of a step by little


def cut(batch: Batch, stages: int, least_tokens: int) -> list[Batch]:
    """As many parts as keep the stages busy, but none smaller than pays (`least_tokens`).

    One stage takes the batch itself. Parts ask for each row's most likely token: how the batch's
    are drawn is the business of who has all logits.
    """
    if stages == 1:
        return [batch]
    tokens = batch.ids.size
    parts = max(1, min(tokens // least_tokens, _MOST_PER_STAGE * stages))
    bounds = np.linspace(0, tokens, parts + 1).astype(int) // BLOCK_TOKENS * BLOCK_TOKENS
    bounds[-1] = tokens
    return [_part(batch, start, end) for start, end in pairwise(bounds.tolist()) if start < end]


def _part(batch: Batch, start: int, end: int) -> Batch:
    """Tokens start..end of the batch, and the sequences that they are of."""
    first = int(np.searchsorted(batch.query_start, start, side="right")) - 1
    last = int(np.searchsorted(batch.query_start, end, side="left"))
    query_start = np.clip(batch.query_start[first : last + 1], start, end) - np.int32(start)
    rows = batch.logit_rows[(batch.logit_rows >= start) & (batch.logit_rows < end)]
    return Batch(
        ids=batch.ids[start:end],
        positions=batch.positions[start:end],
        query_start=query_start,
        seq_lens=batch.positions[start:end][query_start[1:] - 1] + np.int32(1),
        slots=np.ascontiguousarray(batch.slots[:, start:end]),
        block_tables=np.ascontiguousarray(batch.block_tables[:, first:last]),
        logit_rows=rows - np.int32(start),
        sampling=SamplingArrays.greedy(rows.size),
    )
