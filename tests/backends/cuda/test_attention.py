"""Paged attention against the reference backend; prefill and decode have the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.cuda.kernels.attention import SPLIT, query_tiles
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.program import FloatArray
from tests.backends.cuda.steps import Heads, PagedSequences

pytestmark = pytest.mark.torch

SMALL = Heads(4, 2, 32, 32)
# One token, one block, one more than a block, more than a split, with and without a past.
LENGTHS, NEW = [1, 16, 17, SPLIT + 44, 90], [1, 16, 3, 18, 0]


def assert_close(out: torch.Tensor, expected: FloatArray, error: float = 3e-6) -> None:
    np.testing.assert_allclose(out.numpy(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("split", [False, True], ids=["one after another", "side by side"])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [
        (None, None, False),
        (5, None, False),  # shorter than a block
        (40, 20.0, False),
        (None, None, True),
        (300, None, True),
        (1, None, True),
    ],
)
def test_a_mixed_batch(
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    split: bool,
    rng: np.random.Generator,
) -> None:
    sequences = PagedSequences(SMALL, LENGTHS, window, rng)
    sinks = rng.standard_normal(SMALL.heads).astype(np.float32) if with_sinks else None
    out = sequences.attend(
        sequences.cache(), NEW, scale=0.3, softcap=softcap, sinks=sinks, split=split
    )
    assert_close(out, sequences.expected(NEW, 0.3, softcap, sinks))


@pytest.mark.parametrize(
    "heads",
    [Heads(1, 1, 64, 64), Heads(9, 3, 64, 64), Heads(7, 1, 80, 48), Heads(70, 1, 16, 8)],
    ids=str,
)
@pytest.mark.parametrize("split", [False, True])
def test_heads_of_any_number_and_size(heads: Heads, split: bool, rng: np.random.Generator) -> None:
    sequences = PagedSequences(heads, [3, 70], None, rng)
    new = [3, 70 // heads.heads]
    out = sequences.attend(sequences.cache(), new, scale=0.125, split=split)
    assert_close(out, sequences.expected(new, 0.125, None, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, rng: np.random.Generator) -> None:
    sequences = PagedSequences(SMALL, [40, 9], None, rng)
    out = sequences.attend(sequences.cache(dtype), [2, 9], scale=0.2, dtype=dtype, split=True)
    assert_close(out, sequences.expected([2, 9], 0.2, None, None), 2e-2)


@pytest.mark.parametrize("split", [False, True])
def test_q8_0(split: bool, rng: np.random.Generator) -> None:
    """Against the reference over what the cache holds after rounding."""
    heads = Heads(4, 2, 64, 96)
    sequences = PagedSequences(heads, [50, 20], 30, rng)
    cache = sequences.cache(torch.int8)
    out = sequences.attend(cache, [4, 20], scale=0.2, split=split)
    sequences.keys = [_stored(sequences, s, cache.keys, cache.key_scales) for s in (0, 1)]
    sequences.values = [_stored(sequences, s, cache.values, cache.value_scales) for s in (0, 1)]
    assert_close(out, sequences.expected([4, 20], 0.2, None, None))


def _stored(
    sequences: PagedSequences, s: int, pages: torch.Tensor, scales: torch.Tensor | None
) -> FloatArray:
    assert scales is not None
    slots = sequences.slots(s, np.arange(sequences.lengths[s], dtype=np.int32))
    real = pages.float() * scales.float().repeat_interleave(32, dim=3)
    rows: FloatArray = real.reshape(-1, *real.shape[2:])[slots].flatten(1).numpy()
    return rows


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_however_it_is_computed(
    window: int | None, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """In one prompt, in a short last chunk, alone, in company, with splits side by side or not."""
    length = SPLIT + 30
    sequences = PagedSequences(SMALL, [length, 33], window, rng)
    cache = sequences.cache(dtype)
    whole = sequences.attend(cache, [40, 33], scale=0.2, dtype=dtype)[:40]
    for new in ([1, 0], [7, 1], [7, 33]):
        for split in (False, True):
            part = sequences.attend(cache, new, scale=0.2, dtype=dtype, split=split)[: new[0]]
            assert torch.equal(part, whole[40 - new[0] :]), f"{new}, side by side {split}"


def test_tiles_are_cut_at_sequences() -> None:
    start = np.array([0, 1, 1, 20, 60], np.int32)
    tiles = query_tiles(start, heads=8, kv_heads=2)
    np.testing.assert_array_equal(
        tiles, [[0, 0, 1], [2, 1, 17], [2, 17, 20], [3, 20, 36], [3, 36, 52], [3, 52, 60]]
    )
    assert query_tiles(np.zeros(1, np.int32), 8, 2).shape == (0, 3)


def test_padding_tiles_do_nothing(rng: np.random.Generator) -> None:
    from localllm.backends.cuda.kernels.attention import AttentionShape, attend

    sequences = PagedSequences(SMALL, [5], None, rng)
    out = torch.full((1, 128), 7.0)
    attend(
        AttentionShape(4, 1.0),
        torch.zeros(1, 128),
        sequences.cache(),
        out,
        block_table=torch.from_numpy(sequences.table),
        positions=torch.tensor([4], dtype=torch.int32),
        tiles=torch.full((2, 3), -1, dtype=torch.int32),
    )
    assert (out == 7).all()


def test_q8_0_wants_whole_groups() -> None:
    with pytest.raises(ValueError, match="80"):
        PagedCache.empty(1, 1, 80, 64, torch.int8)
