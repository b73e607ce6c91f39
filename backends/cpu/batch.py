"""Batches at the border to native code, which believes every number that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.base import BLOCK_TOKENS, Batch, SamplingArrays, StepLimits

Array = npt.NDArray[Any]

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)

# In the order in which the step header points at them.
_SAMPLING_TYPES: dict[str, np.dtype[Any]] = {
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
}
_PER_ROW = tuple(_SAMPLING_TYPES)[:10]
assert tuple(_SAMPLING_TYPES) == tuple(f.name for f in fields(SamplingArrays))


def addresses(arrays: Sequence[Array]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


def step_arrays(batch: Batch) -> list[Array]:
    """The batch's own arrays, in the order of the step header."""
    return [
        batch.ids,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        batch.logit_rows,
        batch.slots,
        batch.block_tables,
    ]


def sampling_arrays(batch: Batch) -> list[Array]:
    return [getattr(batch.sampling, name) for name in _SAMPLING_TYPES]


def check(batch: Batch, limits: StepLimits, vocab: int, n_blocks: Sequence[int]) -> None:
    """Raises ValueError for a batch that would make native code leave its memory."""
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
        if array.shape != shape or array.dtype != _INT32 or not array.flags.c_contiguous:
            yield f"{name} is {array.dtype} {array.shape}, not contiguous int32 {shape}"
    for name, dtype in _SAMPLING_TYPES.items():
        array = getattr(batch.sampling, name)
        if array.dtype != dtype or not array.flags.c_contiguous:
            yield f"sampling.{name} is {array.dtype}, not contiguous {dtype}"
        if name in _PER_ROW and array.size != rows:
            yield f"sampling.{name} has {array.size} entries for {rows} logit rows"


def _outside(array: Array, end: int) -> bool:
    return array.size > 0 and (int(array.min()) < 0 or int(array.max()) >= end)


def first_tokens(tokens: int, groups: int) -> Batch:
    """One greedy sequence of a few tokens in block 0 of every group; asks for one token."""

    def repeat(value: float, dtype: type[np.generic]) -> Array:
        return np.full(1, value, dtype)

    none, empty = np.zeros(2, np.int32), np.zeros(0, np.int32)
    return Batch(
        ids=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        query_start=np.array([0, tokens], np.int32),
        seq_lens=np.array([tokens], np.int32),
        slots=np.tile(np.arange(tokens, dtype=np.int32), (groups, 1)),
        block_tables=np.zeros((groups, 1, 1), np.int32),
        logit_rows=np.array([tokens - 1], np.int32),
        sampling=SamplingArrays(
            temperature=repeat(0, np.float32),
            top_k=repeat(0, np.int32),
            top_p=repeat(1, np.float32),
            min_p=repeat(0, np.float32),
            repetition_penalty=repeat(1, np.float32),
            presence_penalty=repeat(0, np.float32),
            frequency_penalty=repeat(0, np.float32),
            seed=repeat(0, np.uint64),
            choice=repeat(0, np.uint32),
            index=repeat(0, np.uint32),
            bias_start=none,
            bias_ids=empty,
            bias_values=np.zeros(0, np.float32),
            history_start=none,
            history_ids=empty,
            history_counts=empty,
        ),
    )
