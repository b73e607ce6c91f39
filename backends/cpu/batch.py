"""Batches at the border to native code, which believes every number that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, types

from localllm.backends.base import BLOCK_TOKENS, Batch, SamplingArrays, StepLimits
from localllm.backends.cpu.batch_check import SAMPLING_TYPES, check
from localllm.backends.cpu.kernel import (
    H_BLOCK_TABLES,
    H_IDS,
    H_LOGIT_ROW_IDS,
    H_LOGIT_ROWS,
    H_POSITIONS,
    H_QUERY_START,
    H_SAMPLING,
    H_SEQ_LENS,
    H_SEQS,
    H_SLOTS,
    H_TABLE_BLOCKS,
    H_TOKENS,
    helper,
    native,
)
from localllm.backends.cpu.simd import address_of

Array = npt.NDArray[Any]


def fill_header(
    header: Array, batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]
) -> None:
    """Sets a step header's sizes, and points it at the batch's arrays.

    Raises ValueError for a batch that would make the kernels leave their memory.
    """
    bounds = np.array(
        [limits.tokens, limits.seqs, limits.logit_rows, limits.context, vocab, *n_blocks], np.int64
    )
    sampling = batch.sampling
    try:
        good = _fill_header(
            header,
            bounds,
            batch.ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.logit_rows,
            batch.slots,
            batch.block_tables,
            *[getattr(sampling, name) for name in SAMPLING_TYPES],
        )
    except TypeError:  # an array of another type or layout
        good = False
    if not good:
        check(batch, limits, vocab, n_blocks)
        raise ValueError("bad batch")


_INTS = types.int32[::1]


@helper
def _within(values: Array, end: int) -> bool:
    good = True
    for value in values:
        good &= 0 <= value < end
    return good


@helper
def _ranges_are_good(starts: Array, ids: Array, values: Array, vocab: int) -> bool:
    """Each row has a range of the ids, all of which are tokens."""
    good = starts[0] == 0 and starts[starts.size - 1] == ids.size == values.size
    for row in range(starts.size - 1):
        good &= starts[row] <= starts[row + 1]
    return good and _within(ids, vocab)


@helper
def _masks_are_good(rows: Array, masks: Array, vocab: int) -> bool:
    words = (vocab + 31) // 32
    count = masks.size // words
    good = masks.size == count * words
    for row in rows:
        good &= -1 <= row < count
    return good


@helper
def _step_is_good(
    bounds: Array,
    ids: Array,
    positions: Array,
    query_start: Array,
    seq_lens: Array,
    logit_rows: Array,
    slots: Array,
    tables: Array,
) -> bool:
    """The checks of `check`, quickly."""
    tokens, seqs, groups = ids.size, seq_lens.size, bounds.size - 5
    if tokens == 0 or seqs == 0 or tokens > bounds[0] or seqs > bounds[1]:
        return False
    if logit_rows.size > bounds[2] or positions.size != tokens or query_start.size != seqs + 1:
        return False
    if slots.shape != (groups, tokens) or tables.shape[0] != groups or tables.shape[1] != seqs:
        return False
    if query_start[0] != 0 or query_start[seqs] != tokens:
        return False
    for group in range(groups):
        if not _within(slots[group], bounds[5 + group] * BLOCK_TOKENS):
            return False
        for seq in range(seqs):
            for block in tables[group, seq]:
                if block >= bounds[5 + group]:
                    return False
    return (
        _within(ids, bounds[4])
        and _within(positions, bounds[3])
        and _within(seq_lens, bounds[3] + 1)
        and _within(logit_rows, tokens)
    )


@native(
    types.boolean(
        types.int64[::1],
        types.int64[::1],
        *[_INTS] * 5,
        types.int32[:, ::1],
        types.int32[:, :, ::1],
        *[from_dtype(dtype)[::1] for dtype in SAMPLING_TYPES.values()],
    )
)
def _fill_header(
    header: Array,
    bounds: Array,
    ids: Array,
    positions: Array,
    query_start: Array,
    seq_lens: Array,
    logit_rows: Array,
    slots: Array,
    tables: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    repetition_penalty: Array,
    presence_penalty: Array,
    frequency_penalty: Array,
    seed: Array,
    choice: Array,
    index: Array,
    bias_start: Array,
    bias_ids: Array,
    bias_values: Array,
    history_start: Array,
    history_ids: Array,
    history_counts: Array,
    mask_rows: Array,
    masks: Array,
) -> bool:
    """Native, since asking numpy for 25 addresses takes longer than a small op."""
    header[H_TOKENS], header[H_SEQS], header[H_LOGIT_ROWS] = (
        ids.size,
        seq_lens.size,
        logit_rows.size,
    )
    header[H_IDS], header[H_POSITIONS] = address_of(ids), address_of(positions)
    header[H_QUERY_START], header[H_SEQ_LENS] = address_of(query_start), address_of(seq_lens)
    header[H_LOGIT_ROW_IDS] = address_of(logit_rows)
    header[H_SLOTS], header[H_BLOCK_TABLES] = address_of(slots), address_of(tables)
    header[H_TABLE_BLOCKS] = tables.shape[2]
    header[H_SAMPLING + 0] = address_of(temperature)
    header[H_SAMPLING + 1] = address_of(top_k)
    header[H_SAMPLING + 2] = address_of(top_p)
    header[H_SAMPLING + 3] = address_of(min_p)
    header[H_SAMPLING + 4] = address_of(repetition_penalty)
    header[H_SAMPLING + 5] = address_of(presence_penalty)
    header[H_SAMPLING + 6] = address_of(frequency_penalty)
    header[H_SAMPLING + 7] = address_of(seed)
    header[H_SAMPLING + 8] = address_of(choice)
    header[H_SAMPLING + 9] = address_of(index)
    header[H_SAMPLING + 10] = address_of(bias_start)
    header[H_SAMPLING + 11] = address_of(bias_ids)
    header[H_SAMPLING + 12] = address_of(bias_values)
    header[H_SAMPLING + 13] = address_of(history_start)
    header[H_SAMPLING + 14] = address_of(history_ids)
    header[H_SAMPLING + 15] = address_of(history_counts)
    header[H_SAMPLING + 16] = address_of(mask_rows)
    header[H_SAMPLING + 17] = address_of(masks)
    rows = logit_rows.size
    sizes_are_good = (
        temperature.size == rows
        and top_k.size == rows
        and top_p.size == rows
        and min_p.size == rows
        and repetition_penalty.size == rows
        and presence_penalty.size == rows
        and frequency_penalty.size == rows
        and seed.size == rows
        and choice.size == rows
        and index.size == rows
        and bias_start.size == rows + 1
        and history_start.size == rows + 1
        and mask_rows.size == rows
        and _masks_are_good(mask_rows, masks, bounds[4])
        and _ranges_are_good(bias_start, bias_ids, bias_values, bounds[4])
        and _ranges_are_good(history_start, history_ids, history_counts, bounds[4])
    )
    return sizes_are_good and _step_is_good(
        bounds, ids, positions, query_start, seq_lens, logit_rows, slots, tables
    )


def first_tokens(tokens: int, groups: int) -> Batch:
    """One greedy sequence of a few tokens in block 0 of every group; asks for one token."""
    return Batch(
        ids=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        query_start=np.array([0, tokens], np.int32),
        seq_lens=np.array([tokens], np.int32),
        slots=np.tile(np.arange(tokens, dtype=np.int32), (groups, 1)),
        block_tables=np.zeros((groups, 1, 1), np.int32),
        logit_rows=np.array([tokens - 1], np.int32),
        sampling=SamplingArrays.greedy(1),
    )


NATIVES = (_fill_header,)
