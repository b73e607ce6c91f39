"""Rotation of both styles, and the store in the cache, against the reference backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import angles, rope, rope_and_store
from localllm.backends.program import RopeTable
from localllm.backends.reference import ops

pytestmark = pytest.mark.torch

POSITIONS = np.array([0, 3, 900], np.int32)


def table(pairs: int, interleaved: bool) -> RopeTable:
    inv_freq = 10000.0 ** (-np.arange(pairs, dtype=np.float64) / pairs)
    return RopeTable(inv_freq, 1.25, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(8, 4), (64, 32), (80, 20), (96, 48)])
def test_heads_turn_as_in_the_reference(
    interleaved: bool, head_dim: int, pairs: int, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((3, 3 * head_dim + 5)).astype(np.float32)
    used, turn = x[:, 2 : 2 + 3 * head_dim], table(pairs, interleaved)
    out = torch.full((3, 3 * head_dim), torch.nan)
    rope(
        torch.from_numpy(x)[:, 2 : 2 + 3 * head_dim],
        out,
        torch.from_numpy(POSITIONS),
        angles(turn, 1000),
        head_dim,
    )
    expected = ops.rope(np.ascontiguousarray(used), POSITIONS, head_dim, turn)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_rotation_with_the_store(
    interleaved: bool, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    q, k, v = (
        torch.from_numpy(rng.standard_normal((3, width)).astype(np.float32))
        for width in (4 * 64, 2 * 64, 2 * 32)
    )
    cache, turn = PagedCache.empty(5, 2, 64, 32, dtype), table(32, interleaved)
    slots, out = np.array([35, 0, 79], np.int32), torch.empty(3, 4 * 64)
    rope_and_store(
        q, k, v, out, cache, torch.from_numpy(POSITIONS), torch.from_numpy(slots),
        angles(turn, 1000),
    )  # fmt: skip
    expected = ops.rope(q.numpy(), POSITIONS, 64, turn)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)
    rotated = torch.from_numpy(ops.rope(k.numpy(), POSITIONS, 64, turn))
    for pages, scales, rows in (
        (cache.keys, cache.key_scales, rotated),
        (cache.values, cache.value_scales, v),
    ):
        kept, untouched = _rows(pages, scales), np.ones(5 * BLOCK_TOKENS, bool)
        untouched[slots] = False
        assert not kept[untouched].any()
        wanted = rows.reshape(3, 2, -1)
        steps = wanted.reshape(3, 2, -1, 32).abs().amax(-1).repeat_interleave(32, -1) / 127
        error = {
            torch.float32: torch.full_like(wanted, 2e-6),
            torch.float16: wanted.abs() * 2**-11 + 1e-6,
            torch.bfloat16: wanted.abs() * 2**-7,  # the interpreter cuts off
            torch.int8: steps * 0.51 + wanted.abs() * 2**-10,
        }[dtype]
        assert ((kept[slots] - wanted).abs() <= error).all()


def _rows(pages: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """[slots, KV heads, dimension]"""
    real = pages.float()
    if scales is not None:
        real = real * scales.float().repeat_interleave(32, dim=3)
    return real.reshape(-1, *real.shape[2:])


def test_no_rows_is_no_launch() -> None:
    empty = torch.empty(0, 64)
    rope(empty, empty, torch.empty(0, dtype=torch.int32), angles(table(32, False), 4), 64)
