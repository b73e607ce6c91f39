from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.base import Batch, SamplingArrays, StepLimits
from localllm.backends.cpu.batch import fill_header
from localllm.backends.cpu.batch_check import check
from localllm.backends.cpu.kernel import (
    H_IDS,
    H_LOGIT_ROWS,
    H_SAMPLING,
    H_SEQS,
    H_SLOTS,
    H_TOKENS,
    HEADER_WORDS,
)

LIMITS = StepLimits(tokens=16, seqs=2, logit_rows=4, context=64)


def test_a_good_batch_passes() -> None:
    batch, header = Batch.first_tokens(16, 2), np.zeros(HEADER_WORDS, np.int64)
    check(batch, LIMITS, vocab=10, n_blocks=[1, 1])
    copies = fill_header(header, batch, LIMITS, vocab=10, n_blocks=[1, 1])
    assert header[[H_TOKENS, H_SEQS, H_LOGIT_ROWS]].tolist() == [16, 1, 1]
    assert ctypes.string_at(int(header[H_SLOTS]), batch.slots.nbytes) == batch.slots.tobytes()
    for word, field in enumerate(fields(SamplingArrays), H_SAMPLING):
        array = getattr(batch.sampling, field.name)
        assert ctypes.string_at(int(header[word]), array.nbytes) == array.tobytes()
    assert copies is not None


def changed(name: str, change: Callable[[Any], object]) -> Batch:
    batch = Batch.first_tokens(4, 1)
    changes: dict[str, Any] = {name: change(getattr(batch, name))}
    return replace(batch, **changes)


def with_bias(starts: list[int], ids: list[int], values: list[float]) -> Batch:
    sampling = SamplingArrays.greedy(1)
    sampling.bias_start = np.array(starts, np.int32)
    sampling.bias_ids = np.array(ids, np.int32)
    sampling.bias_values = np.array(values, np.float32)
    return replace(Batch.first_tokens(4, 1), sampling=sampling)


def with_masks(rows: list[int], words: int) -> Batch:
    sampling = SamplingArrays.greedy(1)
    sampling.mask_rows = np.array(rows, np.int32)
    sampling.masks = np.zeros(words, np.uint32)
    return replace(Batch.first_tokens(4, 1), sampling=sampling)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch.first_tokens(17, 1), "17 tokens, the step was compiled for 16"),
        (Batch.first_tokens(4, 2), "slots is int32"),
        (changed("ids", lambda a: a + 10), "token ids outside of 0..9"),
        (changed("ids", lambda a: a - 1), "token ids outside of 0..9"),
        (changed("ids", lambda a: a.astype(np.int64)), "ids is int64"),
        (changed("positions", lambda a: a + 61), "positions outside of the context of 64"),
        (changed("seq_lens", lambda a: a + 61), "positions outside of the context of 64"),
        (changed("query_start", lambda a: a * 2), "query_start does not cover the tokens"),
        (changed("logit_rows", lambda a: a + 1), "logit rows outside of 0..3"),
        (changed("slots", lambda a: a + 13), "slots outside of the 1 blocks of KV group 0"),
        (changed("block_tables", lambda a: a + 1), "block tables beyond the 1 blocks"),
        (changed("sampling", lambda _: SamplingArrays.greedy(2)), "has 2 entries for 1 logit"),
        (with_bias([0, 2], [3, 10], [1.0, 1.0]), "bias_ids outside of 0..9"),
        (with_bias([0, 3], [3, 4], [1.0, 1.0]), "bias_start does not divide 2 ids"),
        (with_bias([0, 2], [3, 4], [1.0]), "bias_start does not divide 2 ids with 1 values"),
        (with_bias([1, 2], [3, 4], [1.0, 1.0]), "bias_start does not divide"),
        (with_masks([2], 2), "mask_rows outside of -1..1"),
        (with_masks([-2], 2), "mask_rows outside of -1..1"),
        (with_masks([0, 0], 2), "mask_rows has 2 entries for 1 logit rows"),
    ],
)
def test_a_bad_batch_is_refused(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(batch, LIMITS, vocab=10, n_blocks=[1])
    with pytest.raises(ValueError, match=message):
        fill_header(np.zeros(HEADER_WORDS, np.int64), batch, LIMITS, vocab=10, n_blocks=[1])


def test_arrays_need_not_be_contiguous() -> None:
    batch, header = changed("ids", lambda a: np.repeat(a, 2)[::2]), np.zeros(HEADER_WORDS, np.int64)
    copies = fill_header(header, batch, LIMITS, vocab=10, n_blocks=[1])
    assert ctypes.string_at(int(header[H_IDS]), 16) == batch.ids.tobytes()
    assert copies is not None


def test_a_bias_on_known_tokens_is_fine() -> None:
    header = np.zeros(HEADER_WORDS, np.int64)
    fill_header(header, with_bias([0, 2], [3, 9], [1.0, -1.0]), LIMITS, vocab=10, n_blocks=[1])


def test_blocks_that_a_window_left_behind_are_fine() -> None:
    batch = changed("block_tables", lambda a: np.concatenate([a - 1, a], axis=2))
    check(batch, LIMITS, vocab=10, n_blocks=[1])


def test_masks_may_be_written_later() -> None:
    batch, header = with_masks([0], 1), np.zeros(HEADER_WORDS, np.int64)
    held = fill_header(header, batch, LIMITS, vocab=10, n_blocks=[1])
    batch.sampling.masks[0] = 77
    word = H_SAMPLING + [field.name for field in fields(SamplingArrays)].index("masks")
    assert ctypes.string_at(int(header[word]), 4) == batch.sampling.masks.tobytes()
    assert held is not None
