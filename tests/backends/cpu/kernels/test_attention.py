"""Attention over paged caches: right against the formula, and the same bits however it is cut."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.cpu.kernels import kv
from localllm.backends.cpu.kernels.attention import scratch_bytes
from localllm.backends.cpu.kernels.attention_tiles import PARTITION
from localllm.backends.program import KVGroup, KVLayer
from tests.backends.cpu.kernels.paged import Floats, Paged, Shape

SHAPES = [
    Shape(),
    Shape(heads=1, kv_heads=1, key_dim=64, value_dim=64),
    Shape(heads=9, kv_heads=3, key_dim=64, value_dim=64),
    Shape(heads=8, kv_heads=1, key_dim=80, value_dim=96),
    Shape(heads=10, kv_heads=2, key_dim=20, value_dim=4, window=7),
    Shape(heads=7, kv_heads=1, key_dim=48, value_dim=32, window=33, softcap=5.0),
    Shape(heads=12, kv_heads=2, key_dim=128, value_dim=8, window=300, with_sinks=True),
    Shape(heads=50, kv_heads=1, key_dim=8, value_dim=24, softcap=30.0, with_sinks=True),
]
LENGTHS = [1, 15, 16, 17, 40, PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION + 77]


def check(paged: Paged, sequence: int, first: int, out: Floats) -> None:
    for i, row in enumerate(out):
        expected = paged.formula(sequence, first + i)
        np.testing.assert_allclose(row, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_formula_in_a_mixed_batch(shape: Shape) -> None:
    paged = Paged(shape, LENGTHS)
    paged.store([(s, 0, n - 1) for s, n in enumerate(LENGTHS) if n > 1])
    new = [1, 15, 2, 1, 19, 3, 1, 50, 60]
    ranges = [(s, n - new[s], n) for s, n in enumerate(LENGTHS)]
    for (s, first, _), out in zip(ranges, paged.attend(ranges, threads=2), strict=True):
        check(paged, s, first, out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_chunks_company_or_threads(shape: Shape) -> None:
    n, others = 2 * PARTITION + 40, [70, 3]
    whole = Paged(shape, [n, *others]).attend([(0, 0, n)])[0]
    for chunk, threads, layout in ((1, 1, 1), (7, 3, 2), (100, 2, 3)):
        paged = Paged(shape, [n, *others], layout=layout)
        paged.store([(1, 0, 69), (2, 0, 2)])
        starts = range(0, n, chunk)
        if chunk == 1:  # few of the steps of a decode are enough
            starts = range(n - 30, n)
            paged.store([(0, 0, n - 30)])
        for first in starts:
            end = min(first + chunk, n)
            out = paged.attend([(1, 69, 70), (0, first, end), (2, 2, 3)], threads)[1]
            np.testing.assert_array_equal(out, whole[first:end])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_divided_context_gives_the_same_bits(threads: int) -> None:
    """One thread without memory for parts cannot divide; several with memory do."""
    n = 9 * PARTITION + 5
    paged = Paged(Shape(heads=3, kv_heads=1, key_dim=32, value_dim=32), [n])
    paged.store([(0, 0, n)])
    undivided = paged.attend([(0, n - 2, n)], parts=64 * 64)[0]
    np.testing.assert_array_equal(paged.attend([(0, n - 2, n)], threads)[0], undivided)
    check(paged, 0, n - 2, undivided)


def test_later_positions_leave_no_trace_even_when_they_are_nan() -> None:
    shape = Shape(heads=4, kv_heads=2, key_dim=16, value_dim=16)
    clean, damaged = Paged(shape, [64]), Paged(shape, [64])
    damaged.k[0][40:], damaged.v[0][40:] = np.nan, np.nan
    before, after = (p.attend([(0, 0, 64)])[0] for p in (clean, damaged))
    np.testing.assert_array_equal(before[:40], after[:40])
    assert np.isnan(after[40:]).all()


def test_left_positions_leave_no_trace_even_when_they_are_nan() -> None:
    shape = Shape(heads=4, kv_heads=2, key_dim=16, value_dim=16, window=20)
    clean, damaged = Paged(shape, [90]), Paged(shape, [90])
    damaged.k[0][:30], damaged.v[0][:30] = np.nan, np.nan
    before, after = (p.attend([(0, 0, 90)])[0] for p in (clean, damaged))
    np.testing.assert_array_equal(before[49:], after[49:])
    assert np.isnan(after[:49]).all()


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    shape = Shape(heads=2, kv_heads=1, key_dim=16, value_dim=16)
    paged = Paged(shape, [300])
    paged.q[0] *= 3000
    for position, out in enumerate(paged.attend([(0, 0, 300)])[0]):
        expected = paged.formula(0, position)
        np.testing.assert_allclose(out, expected, rtol=2e-3, atol=1e-3)


def test_store_saturates_and_pads_values_with_zeros() -> None:
    shape = Shape(heads=1, kv_heads=1, key_dim=8, value_dim=4)
    paged = Paged(shape, [20])
    paged.v[0][3], paged.k[0][3] = 1e6, -np.inf
    paged.store([(0, 0, 20)])
    at = int(paged.tables[1, 0, 0]) * paged.block_bytes + kv.layer_offset(paged.group, 1)
    stored = paged.memory[at : at + paged.head_bytes].view(np.float16)
    keys = stored[: 8 * 16].reshape(8, 16).T
    values = stored[8 * 16 : 8 * 16 + 16 * 16].reshape(16, 16)
    np.testing.assert_array_equal(keys[3], np.float16(-65504))
    np.testing.assert_array_equal(values[3, :4], np.float16(65504))
    np.testing.assert_array_equal(values[:, 4:], 0)
    for p in {*range(16)} - {3}:
        np.testing.assert_array_equal(keys[p], paged.k[0][p].astype(np.float16))
        np.testing.assert_array_equal(values[p, :4], paged.v[0][p].astype(np.float16))


def test_blocks_and_layers_do_not_overlap() -> None:
    group = KVGroup(None, [KVLayer(2, 64, 64), KVLayer(1, 20, 4), KVLayer(3, 8, 40)])
    assert kv.head_bytes(group.layers[0]) == 2 * 16 * 128
    assert kv.head_bytes(group.layers[1]) == -(-2 * 16 * (20 + 16) // 64) * 64
    assert kv.layer_offset(group, 0) == 0
    assert kv.layer_offset(group, 2) == sum(map(kv.kv_block_bytes, group.layers[:2]))
    assert kv.group_block_bytes(group) == sum(map(kv.kv_block_bytes, group.layers))


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="9 query heads cannot share 4"):
        scratch_bytes(9, 4, 64, 64)
