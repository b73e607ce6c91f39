"""The KV cache in q8_0: its rounding and its memory."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf import GGMLQuantizationType, quants  # noqa: E402
from torch import Tensor  # noqa: E402

from localllm.backends.base import BLOCK_TOKENS  # noqa: E402
from localllm.backends.program import KVGroup, KVLayer  # noqa: E402
from localllm.backends.torch_common.backend import TorchBackend  # noqa: E402
from localllm.backends.torch_common.kv_cache import LayerCache, Rows, quantized  # noqa: E402
from localllm.backends.torch_common.target import Target  # noqa: E402
from localllm.errors import RequestError  # noqa: E402

pytestmark = pytest.mark.torch

TARGET = Target(torch.device("cpu"), torch.float32, 16, quantized_kv=True)


def values(*shape: int) -> Tensor:
    drawn = np.random.default_rng(3).normal(0, 3, shape).astype(np.float32)
    rows: Tensor = torch.from_numpy(drawn)
    return rows


def test_a_row_is_read_within_half_a_step() -> None:
    rows, new = Rows.empty(TARGET, 64, 2, 64), values(5, 2 * 64)
    slots = torch.tensor([3, 40, 17, 18, 63])
    rows.store(new, slots)
    found = rows.gather(slots).view(5, 4, 32)
    groups = new.view(5, 4, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    assert ((found - groups).abs() <= 0.5001 * step + 1e-3 * groups.abs()).all()
    untouched = rows.gather(torch.tensor([0, 16, 62]))
    assert not untouched.any()


def test_halves_round_away_from_zero_and_nothing_passes_127() -> None:
    row = torch.zeros(1, 32)
    row[0, :6] = torch.tensor([127.0, 0.5, -0.5, 2.5, -3.5, 1e-3])
    codes, scales = quantized(row)
    assert scales.tolist() == [[1.0]]
    assert codes[0, :6].tolist() == [127, 1, -1, 3, -4, 0]
    low = torch.full((1, 32), 1.0)  # whose scale in float16 is less than 1 / 127
    codes, scales = quantized(low)
    assert float(scales) < 1 / 127
    assert set(codes.flatten().tolist()) == {127}
    codes, scales = quantized(torch.zeros(1, 32))
    assert not codes.any()
    assert not scales.any()


def test_the_scales_are_those_of_the_files_format() -> None:
    """gguf-py divides by the scale before its rounding to float16: codes may differ by one."""
    new = values(20, 64)
    codes, scales = quantized(new)
    raw = quants.quantize(new.numpy(), GGMLQuantizationType.Q8_0).reshape(20, 2, 34)
    np.testing.assert_array_equal(scales.numpy()[..., None].view(np.uint8), raw[..., :2])
    theirs = raw[..., 2:].view(np.int8).astype(int)
    assert np.abs(codes.numpy().reshape(20, 2, 32) - theirs).max() <= 1


def test_a_blocks_bytes_are_what_is_allocated() -> None:
    layers = [KVLayer(2, 64, 32), KVLayer(1, 96, 64)]
    backend = TorchBackend(kv_cache_dtype="q8_0")
    assert "KV cache in q8_0" in backend.describe()
    caches = [LayerCache.empty(backend.target, layer, 10) for layer in layers]
    tensors = [t for c in caches for rows in (c.keys, c.values) for t in (rows.data, rows.scales)]
    assert all(t is not None for t in tensors)
    allocated = sum(t.nbytes for t in tensors if t is not None)
    assert backend.kv_block_bytes(KVGroup(None, layers)) * 10 == allocated
    per_token = (2 * (64 + 32) + 96 + 64) * 34 // 32
    assert allocated == 10 * BLOCK_TOKENS * per_token
    assert all(cache.n_blocks == 10 for cache in caches)


def test_heads_without_whole_groups_are_refused() -> None:
    backend = TorchBackend(kv_cache_dtype="q8_0")
    with pytest.raises(RequestError, match="heads of 80 cannot be kept as q8_0") as error:
        backend.kv_block_bytes(KVGroup(None, [KVLayer(1, 80, 64)]))
    assert error.value.param == "kv_cache_dtype"
    with pytest.raises(RequestError, match="heads of 16 cannot"):
        LayerCache.empty(backend.target, KVLayer(1, 64, 16), 2)
