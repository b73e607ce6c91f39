"""What the Triton kernels keep in q8_0 is bit for bit what torch's operations keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import store
from localllm.backends.torch_common.kv_cache import quantized

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 32), (96, 128)])
def test_codes_and_scales_are_torchs(
    key_dim: int, value_dim: int, rng: np.random.Generator
) -> None:
    cache = PagedCache.empty(3, 2, key_dim, value_dim, torch.int8)
    slots = torch.tensor([0, 5, 17, 31, 46, 47], dtype=torch.int32)
    sizes = rng.choice([1e-9, 1e-3, 1.0, 300.0], (6, 1))
    k, v = (
        torch.from_numpy((rng.standard_normal((6, 2 * dim)) * sizes).astype(np.float32))
        for dim in (key_dim, value_dim)
    )
    v[2] = 0
    store(k, v, cache, slots)
    for new, pages, scales in (
        (k, cache.keys, cache.key_scales),
        (v, cache.values, cache.value_scales),
    ):
        assert scales is not None
        expected_codes, expected_scales = quantized(new.view(6, 2, -1))
        assert torch.equal(pages[slots // 16, slots % 16], expected_codes)
        assert torch.equal(scales[slots // 16, slots % 16], expected_scales)
