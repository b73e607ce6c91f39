"""The check in a few calls finds what the one in words finds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Batch, SamplingArrays, StepLimits
from localllm.backends.cpu.batch_check import check
from localllm.backends.cuda import batch_check
from localllm.backends.cuda.batch_check import BatchCheck

pytestmark = pytest.mark.torch

LIMITS = StepLimits(tokens=8, seqs=3, logit_rows=4, context=64)
VOCAB, BLOCKS = 40, [3, 1 << 31]
CHECK = BatchCheck(LIMITS, VOCAB, BLOCKS)
VALUES = (-(1 << 31), -2, -1, 0, 1, 3, 7, 39, 40, 47, 48, 63, 64, 65, (1 << 31) - 1)


def good() -> Batch:
    sampling = SamplingArrays.greedy(2)
    sampling.masks = np.zeros(2, np.uint32)
    return Batch(
        ids=np.array([0, 39, 5, 5], np.int32),
        positions=np.array([0, 1, 63, 0], np.int32),
        query_start=np.array([0, 2, 3, 4], np.int32),
        seq_lens=np.array([2, 64, 1], np.int32),
        slots=np.array([[0, 1, 47, 16], [1 << 30] * 4], np.int32),
        block_tables=np.array([[[0, -1], [-1, 2], [1, 0]]] * 2, np.int32),
        logit_rows=np.array([1, 3], np.int32),
        sampling=sampling,
    )


def fault(batch: Batch) -> str | None:
    """In words; both checks say the same."""
    said: list[str | None] = []
    for run in (CHECK, lambda b: check(b, LIMITS, VOCAB, BLOCKS)):
        try:
            run(batch)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]
    return said[0]


def arrays(batch: Batch) -> list[tuple[object, str, np.ndarray[Any, Any]]]:
    found = [(batch, f.name) for f in fields(Batch) if f.name != "sampling"]
    sampling = [(batch.sampling, f.name) for f in fields(SamplingArrays)]
    return [(owner, name, getattr(owner, name)) for owner, name in (*found, *sampling)]


def test_good_batches_need_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [good(), Batch.first_tokens(4, 2), good()]
    batches[2].logit_rows = batches[2].logit_rows[:0]
    batches[2].sampling = SamplingArrays.greedy(0)
    assert [fault(batch) for batch in batches] == [None] * 3
    monkeypatch.setattr(batch_check, "check", lambda *_: pytest.fail("the slow check"))
    for batch in batches:
        CHECK(batch)


def test_any_number_anywhere() -> None:
    faults: set[str | None] = set()
    for at, (_, _, template) in enumerate(arrays(good())):
        if template.dtype != np.int32:
            continue
        for index in range(template.size):
            for value in VALUES:
                batch = good()
                arrays(batch)[at][2].flat[index] = value
                faults.add(fault(batch))
    assert len(faults) >= 11


def test_shapes_and_types() -> None:
    for at, (_, name, template) in enumerate(arrays(good())):
        kinds = [template.astype(np.int64), template[..., :-1], np.repeat(template, 5, -1)]
        for changed in kinds:
            batch = good()
            owner = arrays(batch)[at][0]
            setattr(owner, name, changed)
            if changed.shape != template.shape or changed.dtype != template.dtype:
                told = fault(batch)
                assert told is not None or name in ("block_tables", "masks"), name


def test_penalties_and_biases_are_looked_at_one_by_one() -> None:
    for ids, starts in (([1, 39], [0, 1, 2]), ([1, 40], [0, 1, 2]), ([1, 2], [0, 3, 2])):
        batch = good()
        batch.sampling = replace(
            batch.sampling,
            history_start=np.array(starts, np.int32),
            history_ids=np.array(ids, np.int32),
            history_counts=np.ones(2, np.int32),
        )
        assert (fault(batch) is None) == (ids[1] == 39)
