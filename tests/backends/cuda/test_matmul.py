"""x @ weight.T for every format, and that a column's bits are its own affair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from localllm.backends.cuda.kernels.elementwise import act_mul
from localllm.backends.cuda.kernels.layout import PLAIN, QUANTIZED, PackedWeight, pack
from localllm.backends.cuda.kernels.matmul import (
    Tiles,
    matmul,
    partial_floats,
    split_chunks,
    tiles_for,
)
from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size
from tests.backends.cuda.blocks import dequantized, random_blocks

pytestmark = pytest.mark.torch

SHAPES = [tiles_for(1), tiles_for(17), tiles_for(65), Tiles(64, 32, 4, 2, side_by_side=False)]


def quantized(
    tensor_type: TensorType, rows: int, cols: int, rng: np.random.Generator
) -> tuple[PackedWeight, npt.NDArray[np.float32]]:
    raw = random_blocks(tensor_type, rows, cols, rng)
    return pack(tensor_type, torch.from_numpy(raw), rows, cols), dequantized(tensor_type, raw)


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def assert_close(out: torch.Tensor, expected: npt.NDArray[np.float32], error: float) -> None:
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(out.float().numpy(), expected, rtol=0, atol=error * largest)


@pytest.mark.parametrize("tensor_type", sorted(QUANTIZED), ids=lambda t: t.name)
@pytest.mark.parametrize("columns", [1, 18])
def test_quantized_products(
    tensor_type: TensorType, columns: int, rng: np.random.Generator
) -> None:
    """A K that fills no whole chunk, rows that fill no whole tile."""
    cols = 256 if block_size(tensor_type) == 256 else 288
    weight, values = quantized(tensor_type, 67, cols, rng)
    x = normal(rng, columns, cols)
    out = torch.full((columns, 67), torch.nan)
    matmul(x, weight, out)
    assert_close(out, x.numpy() @ values.T, 2e-6)


@pytest.mark.parametrize("tensor_type", sorted(QUANTIZED), ids=lambda t: t.name)
def test_one_token_one_row_one_block(tensor_type: TensorType, rng: np.random.Generator) -> None:
    """Next to all of a tile, and for blocks of 32 most of a chunk, is filling."""
    cols = block_size(tensor_type)
    weight, values = quantized(tensor_type, 1, cols, rng)
    x, out = normal(rng, 1, cols), torch.full((1, 1), torch.nan)
    matmul(x, weight, out)
    largest = float(np.abs(x.numpy() * values).max())
    np.testing.assert_allclose(out.numpy(), x.numpy() @ values.T, rtol=0, atol=3e-6 * largest)


@pytest.mark.parametrize("tensor_type", PLAIN, ids=lambda t: t.name)
@pytest.mark.parametrize("cols", [1, 100, 130])
def test_plain_products(tensor_type: TensorType, cols: int, rng: np.random.Generator) -> None:
    values = normal(rng, 65, cols).to(PLAIN[tensor_type])
    weight = pack(tensor_type, values.view(torch.uint8), 65, cols)
    x = normal(rng, 3, cols).to(PLAIN[tensor_type])
    out = torch.empty(3, 65)
    matmul(x, weight, out)
    assert_close(out, x.float().numpy() @ values.float().numpy().T, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_half_precision(dtype: torch.dtype, rng: np.random.Generator) -> None:
    weight, values = quantized(TensorType.Q4_K, 64, 512, rng)
    x = normal(rng, 4, 512).to(dtype)
    out = torch.empty(4, 64, dtype=dtype)
    matmul(x, weight, out)
    rounded = torch.from_numpy(values).to(dtype).float().numpy()
    assert_close(out, x.float().numpy() @ rounded.T, 2e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize(
    ("tensor_type", "dtype"),
    [
        (TensorType.Q4_0, torch.float32),
        (TensorType.Q6_K, torch.float16),
        (TensorType.BF16, torch.bfloat16),
    ],
)
def test_a_column_has_the_same_bits_in_any_company(
    tensor_type: TensorType, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """Alone or among 70, with splits side by side or one after another, in tiles of any size."""
    rows, cols, columns = 66, 2304, 70
    if tensor_type in PLAIN:
        values = normal(rng, rows, cols).to(PLAIN[tensor_type])
        weight = pack(tensor_type, values.view(torch.uint8), rows, cols)
    else:
        weight, _ = quantized(tensor_type, rows, cols, rng)
    assert split_chunks(rows, cols) * 2 < cols // 128, "several splits"
    x, residual = normal(rng, columns, cols).to(dtype), normal(rng, columns, rows)
    bias = normal(rng, rows)
    full = torch.empty(columns, rows)
    matmul(x, weight, full, bias=bias, residual=residual)
    for few, shape in [(1, None), (7, None), (17, None), *((20, shape) for shape in SHAPES)]:
        out = torch.empty(few, rows)
        matmul(x[-few:], weight, out, bias=bias, residual=residual[-few:], tiles=shape)
        assert torch.equal(out, full[-few:]), f"{few} columns, {shape}"


@pytest.mark.parametrize("shape", [tiles_for(1), tiles_for(65)])
def test_windows_bias_residual_and_scratch(shape: Tiles, rng: np.random.Generator) -> None:
    weight, values = quantized(TensorType.Q8_0, 48, 1056, rng)
    x, out = normal(rng, 3, 1100)[:, 20:1076], torch.full((3, 80), 7.0)
    bias, residual = normal(rng, 48), normal(rng, 3, 60)[:, 6:54]
    expected = x.numpy() @ values.T + bias.numpy() + residual.numpy()
    scratch = torch.empty(partial_floats(48, 1056, 3))
    matmul(x, weight, out[:, 8:56], bias=bias, residual=residual, scratch=scratch, tiles=shape)
    assert_close(out[:, 8:56], expected, 2e-6)
    assert (out[:, :8] == 7).all()
    assert (out[:, 56:] == 7).all()


def test_a_residual_may_be_the_output(rng: np.random.Generator) -> None:
    weight, values = quantized(TensorType.Q4_0, 32, 64, rng)
    x, out = normal(rng, 2, 64), normal(rng, 2, 32)
    expected = x.numpy() @ values.T + out.numpy()
    matmul(x, weight, out, residual=out)
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize(
    ("tensor_type", "half", "cols", "dtype"),
    [
        (TensorType.Q8_0, 35, 1056, torch.float16),  # halves that fill no tile, several splits
        (TensorType.Q4_K, 1, 256, torch.bfloat16),
        (TensorType.F32, 70, 40, torch.float32),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gates_have_the_bits_of_two_steps(
    tensor_type: TensorType,
    half: int,
    cols: int,
    dtype: torch.dtype,
    with_bias: bool,
    rng: np.random.Generator,
) -> None:
    """In the type of the next product, in any company."""
    if tensor_type in PLAIN:
        values = normal(rng, 2 * half, cols)
        weight = pack(tensor_type, values.view(torch.uint8), 2 * half, cols)
    else:
        weight, _ = quantized(tensor_type, 2 * half, cols, rng)
    x, bias = normal(rng, 20, cols).to(dtype), normal(rng, 2 * half) if with_bias else None
    both, expected = torch.empty(20, 2 * half, dtype=dtype), torch.empty(20, half, dtype=dtype)
    matmul(x, weight, both, bias=bias)
    act_mul(both[:, :half], both[:, half:], expected, "silu")
    for few, shape in [(1, None), *((20, shape) for shape in SHAPES)]:
        wide = torch.full((few, half + 9), 7.0, dtype=dtype)
        matmul(x[-few:], weight, wide[:, 4 : 4 + half], bias=bias, act="silu", tiles=shape)
        assert torch.equal(wide[:, 4 : 4 + half], expected[-few:]), f"{few} columns, {shape}"
        assert (wide[:, :4] == 7).all()
        assert (wide[:, 4 + half :] == 7).all()


def test_no_columns_is_no_launch(rng: np.random.Generator) -> None:
    weight, _ = quantized(TensorType.Q4_0, 32, 64, rng)
    matmul(torch.empty(0, 64), weight, torch.empty(0, 32))
