"""Batches as bytes and in parts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, SamplingArrays
from localllm.backends.parallel.micro_batches import cut
from localllm.backends.parallel.wire import pack, unpack

ARRAYS = [field.name for field in fields(Batch) if field.name != "sampling"]
COUNTS = [[1], [1, 1, 1], [700], [300, 1, 1, 90, 64, 1], [1] * 200, [16, 48, 5]]


def make_batch(counts: list[int], groups: int = 2, blocks: int = 80) -> Batch:
    """Sequences with so many new tokens each; of the rows that need logits some are the last."""
    draw = np.random.default_rng(sum(counts))
    ends = np.cumsum(counts)
    starts = draw.integers(0, blocks * BLOCK_TOKENS - max(counts), len(counts))
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    rows = np.union1d(ends[::2] - 1, draw.integers(0, ends[-1], 3))
    return Batch(
        ids=draw.integers(0, 1000, ends[-1]).astype(np.int32),
        positions=positions.astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=(starts + counts).astype(np.int32),
        slots=draw.integers(0, 10**6, (groups, ends[-1])).astype(np.int32),
        block_tables=draw.integers(-1, 10**5, (groups, len(counts), blocks)).astype(np.int32),
        logit_rows=rows.astype(np.int32),
        sampling=SamplingArrays.greedy(rows.size),
    )


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_batch_comes_out_as_it_went_in(counts: list[int]) -> None:
    batch = make_batch(counts)
    found = unpack(pack(batch))
    for name in ARRAYS:
        array: Int32Array = getattr(found, name)
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, getattr(batch, name), strict=True)
    assert found.sampling.temperature.size == batch.logit_rows.size


def test_a_batch_without_logit_rows_crosses() -> None:
    batch = make_batch([3, 4])
    batch.logit_rows = np.zeros(0, np.int32)
    assert unpack(pack(batch)).logit_rows.shape == (0,)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_parts_are_the_batch(counts: list[int], stages: int) -> None:
    batch, least = make_batch(counts), 32
    parts = cut(batch, stages, least)
    tokens = sum(counts)
    assert len(parts) == max(1, min(tokens // least, 4 * stages))
    assert all(part.ids.size >= least - BLOCK_TOKENS for part in parts) or tokens < least
    starts = np.cumsum([0, *(part.ids.size for part in parts)])
    for name, axis in (("ids", 0), ("positions", 0), ("slots", 1)):
        whole = np.concatenate([getattr(part, name) for part in parts], axis)
        np.testing.assert_array_equal(whole, getattr(batch, name))
    rows = [part.logit_rows + start for part, start in zip(parts, starts, strict=False)]
    np.testing.assert_array_equal(np.concatenate(rows), batch.logit_rows)
    owners = np.repeat(np.arange(len(counts)), counts)
    for part, start in zip(parts, starts, strict=False):
        assert part.query_start[0] == 0
        assert (np.diff(part.query_start) > 0).all()
        for s, (first, end) in enumerate(
            zip(part.query_start[:-1], part.query_start[1:], strict=True)
        ):
            assert len(set(owners[start + first : start + end])) == 1
            owner = owners[start + first]
            assert part.seq_lens[s] == part.positions[end - 1] + 1
            np.testing.assert_array_equal(part.block_tables[:, s], batch.block_tables[:, owner])


def test_one_stage_has_nothing_to_cut() -> None:
    batch = make_batch([700])
    assert cut(batch, 1, 32) == [batch]
