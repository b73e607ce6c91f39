"""What is wrong with a batch, in words; `batch.fill_header` finds quickly whether anything is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.base import (
    BLOCK_TOKENS,
    Batch,
    SamplingArrays,
    StepLimits,
    mask_words,
)

Array = npt.NDArray[Any]

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)

# In the order in which the step header points at them.
SAMPLING_TYPES: dict[str, np.dtype[Any]] = {
    "temperature": _FLOAT32,
    "top_k": _INT32,
    "top_p": _FLOAT32,
    "min_p": _FLOAT32,
    "repetition_penalty": _FLOAT32,
    "presence_penalty": _FLOAT32,
    "frequency_penalty": _FLOAT32,
    "seed": _UINT64,
    "choice": _UINT32,
    "index": _UINT32,
    "bias_start": _INT32,
    "bias_ids": _INT32,
    "bias_values": _FLOAT32,
    "history_start": _INT32,
    "history_ids": _INT32,
    "history_counts": _INT32,
    "mask_rows": _INT32,
    "masks": _UINT32,
}
PER_ROW = (*tuple(SAMPLING_TYPES)[:10], "mask_rows")
assert tuple(SAMPLING_TYPES) == tuple(f.name for f in fields(SamplingArrays))


def check(batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]) -> None:
    """Raises a ValueError that says what is wrong with the batch, if anything is."""
    for problem in _problems(batch, limits, vocab, n_blocks):
        raise ValueError(f"bad batch: {problem}")


def _problems(
    batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]
) -> Iterator[str]:
    tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
    for what, count, most in (
        ("tokens", tokens, limits.tokens),
        ("sequences", seqs, limits.seqs),
        ("logit rows", rows, limits.logit_rows),
    ):
        if count > most:
            yield f"{count} {what}, the step was compiled for {most}"
    yield from _shape_problems(batch, tokens, seqs, rows, len(n_blocks))
    yield from _range_problems(batch.sampling, vocab)
    if tokens == 0 or seqs == 0:
        yield "no tokens"
    if _outside(batch.ids, vocab):
        yield f"token ids outside of 0..{vocab - 1}"
    if _outside(batch.logit_rows, tokens):
        yield f"logit rows outside of 0..{tokens - 1}"
    if batch.query_start[0] != 0 or batch.query_start[-1] != tokens:
        yield "query_start does not cover the tokens"
    if _outside(batch.seq_lens, limits.context + 1) or _outside(batch.positions, limits.context):
        yield f"positions outside of the context of {limits.context}"
    for group, most in enumerate(n_blocks):
        if _outside(batch.slots[group], most * BLOCK_TOKENS):
            yield f"slots outside of the {most} blocks of KV group {group}"
        if batch.block_tables[group].max(initial=-1) >= most:
            yield f"block tables beyond the {most} blocks of KV group {group}"


def _shape_problems(batch: Batch, tokens: int, seqs: int, rows: int, groups: int) -> Iterator[str]:
    for name, array, shape in (
        ("ids", batch.ids, (tokens,)),
        ("positions", batch.positions, (tokens,)),
        ("query_start", batch.query_start, (seqs + 1,)),
        ("seq_lens", batch.seq_lens, (seqs,)),
        ("logit_rows", batch.logit_rows, (rows,)),
        ("slots", batch.slots, (groups, tokens)),
        ("block_tables", batch.block_tables, (groups, seqs, batch.block_tables.shape[-1])),
    ):
        if array.shape != shape or array.dtype != _INT32:
            yield f"{name} is {array.dtype} {array.shape}, not int32 {shape}"
    for name, dtype in SAMPLING_TYPES.items():
        array = getattr(batch.sampling, name)
        if array.dtype != dtype:
            yield f"sampling.{name} is {array.dtype}, not {dtype}"
        expected = rows + 1 if name.endswith("_start") else rows
        if (name in PER_ROW or name.endswith("_start")) and array.size != expected:
            yield f"sampling.{name} has {array.size} entries for {rows} logit rows"


def _range_problems(sampling: SamplingArrays, vocab: int) -> Iterator[str]:
    for name, starts, ids, values in (
        ("bias", sampling.bias_start, sampling.bias_ids, sampling.bias_values),
        ("history", sampling.history_start, sampling.history_ids, sampling.history_counts),
    ):
        rising = starts.size > 0 and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
        if not rising or starts[-1] != ids.size or ids.size != values.size:
            yield f"sampling.{name}_start does not divide {ids.size} ids with {values.size} values"
        if _outside(ids, vocab):
            yield f"sampling.{name}_ids outside of 0..{vocab - 1}"
    masks = sampling.masks.size // mask_words(vocab)
    if masks * mask_words(vocab) != sampling.masks.size or _outside(
        sampling.mask_rows + 1, masks + 1
    ):
        yield f"sampling.mask_rows outside of -1..{masks - 1}"


def _outside(array: Array, end: int) -> bool:
    return array.size > 0 and (int(array.min()) < 0 or int(array.max()) >= end)
