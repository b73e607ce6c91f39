"""A batch as bytes: what every rank has to know of a step."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from localllm.backends.base import Batch, Int32Array, SamplingArrays

_HEAD = 5


def pack(batch: Batch) -> bytes:
    """All but how tokens are drawn, which is rank 0's own business: int32 words, sizes first."""
    groups, seqs, blocks = batch.block_tables.shape
    head = np.array([batch.ids.size, seqs, batch.logit_rows.size, groups, blocks], np.int32)
    return b"".join(
        array.tobytes()
        for array in (
            head,
            batch.ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.slots,
            batch.block_tables,
            batch.logit_rows,
        )
    )


def unpack(packed: bytes) -> Batch:
    """The arrays are read-only; every row asks for its most likely token."""
    words: Int32Array = np.frombuffer(packed, np.int32)
    tokens, seqs, rows, groups, blocks = words[:_HEAD].tolist()
    shapes = (
        (tokens,),
        (tokens,),
        (seqs + 1,),
        (seqs,),
        (groups, tokens),
        (groups, seqs, blocks),
        (rows,),
    )
    ends = np.cumsum([_HEAD, *(math.prod(shape) for shape in shapes)]).tolist()
    ids, positions, query_start, seq_lens, slots, tables, logit_rows = (
        words[start:end].reshape(shape)
        for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    )
    return Batch(
        ids=ids,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        slots=slots,
        block_tables=tables,
        logit_rows=logit_rows,
        sampling=SamplingArrays.greedy(rows),
    )
