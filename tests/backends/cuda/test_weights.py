"""Repacking and dequantization of every format, against gguf-py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import PLAIN, QUANTIZED, TILE_ROWS, pack
from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size
from tests.backends.cuda.blocks import dequantized, random_blocks

pytestmark = pytest.mark.torch

FORMATS = sorted(QUANTIZED)


@pytest.mark.parametrize("tensor_type", FORMATS, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, TILE_ROWS, TILE_ROWS + 3])
def test_quantized_rows_are_what_gguf_py_says(
    tensor_type: TensorType, rows: int, rng: np.random.Generator
) -> None:
    for cols in {block_size(tensor_type), 5 * block_size(tensor_type)}:
        raw = random_blocks(tensor_type, rows, cols, rng)
        expected = dequantized(tensor_type, raw)
        weight = pack(tensor_type, torch.from_numpy(raw), rows, cols)
        ids = rng.integers(0, rows, 19).astype(np.int32)
        ids[0] = rows - 1
        out = torch.full((19, cols), torch.nan)
        embed(torch.from_numpy(ids), weight, out)
        largest = np.abs(expected).max()
        np.testing.assert_allclose(out.numpy(), expected[ids], rtol=0, atol=2e-7 * largest)


def test_every_code_of_mxfp4_and_its_smallest_scales(rng: np.random.Generator) -> None:
    raw = random_blocks(TensorType.MXFP4, 256, 32, rng)
    raw[:, 0] = np.arange(256)  # all exponents, subnormal ones among them
    raw[:, 1:] = np.arange(16) * 17
    raw = raw[:253]  # from there on its 6 is no float32
    out = torch.empty(253, 32)
    weight = pack(TensorType.MXFP4, torch.from_numpy(raw), 253, 32)
    embed(torch.arange(253, dtype=torch.int32), weight, out)
    np.testing.assert_array_equal(out.numpy(), dequantized(TensorType.MXFP4, raw))


@pytest.mark.parametrize("tensor_type", PLAIN, ids=lambda t: t.name)
def test_plain_rows(tensor_type: TensorType) -> None:
    values = torch.randn(7, 100).to(PLAIN[tensor_type])
    weight = pack(tensor_type, values.view(torch.uint8), 7, 100)
    out = torch.zeros(2, 104)
    embed(torch.tensor([6, 3], dtype=torch.int32), weight, out[:, :100])
    assert torch.equal(out[:, :100], values[[6, 3]].float())
    assert not out[:, 100:].any()


def test_no_ids_is_no_launch() -> None:
    weight = pack(TensorType.F32, torch.zeros(4, 16, dtype=torch.uint8), 4, 4)
    embed(torch.empty(0, dtype=torch.int32), weight, torch.empty(0, 4))


@pytest.mark.parametrize("tensor_type", FORMATS, ids=lambda t: t.name)
def test_a_packed_weight_is_hardly_larger_than_the_file(
    tensor_type: TensorType, rng: np.random.Generator
) -> None:
    raw = random_blocks(tensor_type, 2 * TILE_ROWS, 512, rng)
    assert pack(tensor_type, torch.from_numpy(raw), 2 * TILE_ROWS, 512).n_bytes <= 1.04 * raw.size


def test_a_format_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="TQ1_0"):
        pack(TensorType.TQ1_0, torch.zeros(1, 54, dtype=torch.uint8), 1, 256)
