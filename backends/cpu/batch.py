"""Batches at the border to native code, which believes every number that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from localllm.backends.base import BLOCK_TOKENS, Batch, StepLimits, mask_words
from localllm.backends.cpu.batch_check import SAMPLING_TYPES, check
from localllm.backends.cpu.kernel import (
    H_IDS,
    H_LOGIT_ROWS,
    H_SAMPLING,
    H_SEQS,
    H_TABLE_BLOCKS,
    H_TOKENS,
    native,
)
from localllm.backends.cpu.simd import scalar_load_i32

Array = npt.NDArray[Any]

# In the order of the header's words, H_IDS to H_BLOCK_TABLES.
_STEP_ARRAYS = (
    "ids",
    "positions",
    "query_start",
    "seq_lens",
    "logit_rows",
    "slots",
    "block_tables",
)
_TYPES = [np.dtype(np.int32)] * len(_STEP_ARRAYS) + list(SAMPLING_TYPES.values())
_ITEM_BYTES = [dtype.itemsize for dtype in _TYPES]
_SAMPLING = len(_STEP_ARRAYS)
_BIAS_START = list(SAMPLING_TYPES).index("bias_start")
_LEAST = int(np.iinfo(np.int32).min)


def fill_header(
    header: Array, batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]
) -> object:
    """Sets a step header's sizes, and points it at copies of the batch's arrays; at the masks
    themselves, since they are written later (see `SamplingArrays`).

    Returns what holds the copies: the caller keeps it as long as the header is used. Raises
    ValueError for a batch that would make the kernels leave their memory.
    """
    arrays = [getattr(batch, name) for name in _STEP_ARRAYS]
    arrays += [getattr(batch.sampling, name) for name in SAMPLING_TYPES]
    sizes = [array.size for array in arrays]
    good = [array.dtype for array in arrays] == _TYPES
    good = good and _sizes_are_good(sizes, batch, limits, vocab, len(n_blocks))
    # One join, since asking numpy for 25 addresses takes longer than a small op.
    copies = np.frombuffer(b"".join([array.tobytes() for array in arrays[:-1]]), np.uint8)
    masks = np.ascontiguousarray(batch.sampling.masks)
    ends = accumulate(map(mul, sizes[:-1], _ITEM_BYTES), initial=copies.ctypes.data)
    addresses = [*list(ends)[:-1], masks.ctypes.data]
    if not good or not _values_are_good(_bounds(addresses, batch, limits, vocab, n_blocks)):
        check(batch, limits, vocab, n_blocks)
        raise ValueError("bad batch")
    header[H_TOKENS], header[H_SEQS] = batch.ids.size, batch.seq_lens.size
    header[H_LOGIT_ROWS] = batch.logit_rows.size
    header[H_IDS : H_IDS + _SAMPLING] = addresses[:_SAMPLING]
    header[H_TABLE_BLOCKS] = batch.block_tables.shape[2]
    header[H_SAMPLING : H_SAMPLING + len(SAMPLING_TYPES)] = addresses[_SAMPLING:]
    return copies, masks


def _sizes_are_good(
    sizes: list[int], batch: Batch, limits: StepLimits, vocab: int, groups: int
) -> bool:
    """Whether the arrays fit each other and the limits; `check` says the same in words."""
    tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
    sampling = batch.sampling
    bias, history = sampling.bias_ids.size, sampling.history_ids.size
    return (
        0 < tokens <= limits.tokens
        and 0 < seqs <= limits.seqs
        and rows <= limits.logit_rows
        and batch.slots.shape == (groups, tokens)
        and batch.block_tables.shape == (groups, seqs, batch.block_tables.shape[-1])
        and sizes[:5] == [tokens, tokens, seqs + 1, seqs, rows]
        and sizes[_SAMPLING:-1]
        == [rows] * 10 + [rows + 1, bias, bias, rows + 1, history, history, rows]
        and sampling.masks.size % mask_words(vocab) == 0
    )


def _bounds(
    addresses: list[int], batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]
) -> Array:
    """What `_values_are_good` takes: every index in the batch, and where it must stay."""
    ids, positions, query_start, seq_lens, logit_rows, slots, tables, *sampling = addresses
    bias_start, bias_ids, _, history_start, history_ids, _, mask_rows, _ = sampling[_BIAS_START:]
    tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
    biased, known = batch.sampling.bias_ids.size, batch.sampling.history_ids.size
    bounds = [
        *(ids, tokens, 0, vocab, 0, 0),
        *(positions, tokens, 0, limits.context, 0, 0),
        *(query_start, seqs + 1, 0, tokens + 1, 1, tokens),
        *(seq_lens, seqs, 0, limits.context + 1, 0, 0),
        *(logit_rows, rows, 0, tokens, 0, 0),
        *(mask_rows, rows, -1, batch.sampling.masks.size // mask_words(vocab), 0, 0),
        *(bias_start, rows + 1, 0, biased + 1, 1, biased),
        *(bias_ids, biased, 0, vocab, 0, 0),
        *(history_start, rows + 1, 0, known + 1, 1, known),
        *(history_ids, known, 0, vocab, 0, 0),
    ]
    in_table = seqs * batch.block_tables.shape[2]
    for group, blocks in enumerate(n_blocks):
        bounds += (slots + group * tokens * 4, tokens, 0, blocks * BLOCK_TOKENS, 0, 0)
        bounds += (tables + group * in_table * 4, in_table, _LEAST, blocks, 0, 0)
    return np.array(bounds, np.int64).reshape(-1, 6)


@native(types.boolean(types.int64[:, ::1]))
def _values_are_good(bounds: Array) -> bool:
    """Each row: address and number of int32 values; least value, end; whether they divide a range.

    Those that do start with 0, never fall, and end with the row's last entry.
    """
    good = True
    for row in range(bounds.shape[0]):
        values, last = bounds[row, 0], bounds[row, 1] - 1
        for at in range(last + 1):
            value = scalar_load_i32(values, at * 4)
            good &= bounds[row, 2] <= value < bounds[row, 3]
        if bounds[row, 4] != 0:
            good &= scalar_load_i32(values, 0) == 0
            good &= scalar_load_i32(values, last * 4) == bounds[row, 5]
            for at in range(last):
                good &= scalar_load_i32(values, at * 4) <= scalar_load_i32(values, at * 4 + 4)
    return good


NATIVES = (_values_are_good,)
