"""Experts against the reference backend, and that a row's bits are its own affair."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from localllm.backends.cuda.kernels.layout import PackedWeight, pack
from localllm.backends.cuda.kernels.matmul import Tiles
from localllm.backends.cuda.kernels.moe import group_pairs, moe, route
from localllm.backends.program import FloatArray
from localllm.backends.reference import ops
from localllm.gguf import TensorType
from tests.backends.cuda.blocks import dequantized, random_blocks

pytestmark = pytest.mark.torch

EXPERTS, WIDTH, FFN = 5, 96, 64


def experts(
    tensor_type: TensorType, rows: int, cols: int, rng: np.random.Generator
) -> tuple[PackedWeight, FloatArray]:
    raw = random_blocks(tensor_type, EXPERTS * rows, cols, rng)
    values = dequantized(tensor_type, raw).reshape(EXPERTS, rows, cols)
    return pack(tensor_type, torch.from_numpy(raw), rows, cols, EXPERTS), values


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(
    ("gating", "normalize", "used"),
    [("softmax", True, 2), ("softmax", False, 1), ("sigmoid", True, 3), ("sigmoid", False, 5)],
)
@pytest.mark.parametrize("rows", [1, 9])
def test_experts_answer_as_in_the_reference(
    gating: Literal["softmax", "sigmoid"],
    normalize: bool,
    used: int,
    rows: int,
    rng: np.random.Generator,
) -> None:
    gate, gate_values = experts(TensorType.Q4_0, FFN, WIDTH, rng)
    up, up_values = experts(TensorType.Q5_1, FFN, WIDTH, rng)
    down, down_values = experts(TensorType.Q8_0, WIDTH, FFN, rng)
    x, logits = normal(rng, rows, WIDTH), normal(rng, rows, EXPERTS)
    out = torch.full((rows, WIDTH), torch.nan)
    moe(
        x, logits, gate, up, down, out,
        used=used, act="silu", gating=gating, normalize=normalize, scale=1.5,
    )  # fmt: skip
    expected = ops.moe(
        x.numpy(), logits.numpy(), gate_values, up_values, down_values,
        used=used, act="silu", gating=gating, normalize=normalize, scale=1.5,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_a_row_has_the_same_bits_in_any_company(rng: np.random.Generator) -> None:
    """Also where the number of rows changes the tiles."""
    gate, _ = experts(TensorType.Q4_0, FFN, WIDTH, rng)
    down, _ = experts(TensorType.Q4_0, WIDTH, FFN, rng)
    x, logits = normal(rng, 50, WIDTH), normal(rng, 50, EXPERTS)

    def answer(rows: slice) -> torch.Tensor:
        out = torch.empty_like(x[rows])
        moe(
            x[rows], logits[rows], gate, gate, down, out,
            used=2, act="gelu", gating="softmax", normalize=True, scale=1.0,
        )  # fmt: skip
        return out

    whole = answer(slice(0, 50))
    assert torch.equal(answer(slice(49, 50)), whole[49:])
    assert torch.equal(answer(slice(3, 9)), whole[3:9])


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    weights, chosen = route(logits, 3, gating="softmax", normalize=True, scale=2.0)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 2 / 3))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_shares_of_zero_and_damaged_rows_have_experts_too() -> None:
    logits = torch.tensor([[0.0, -200.0, -200.0, 0.0, -200.0], [torch.nan] * 5])
    weights, chosen = route(logits, 3, gating="softmax", normalize=True, scale=1.0)
    assert chosen[0].tolist() == [0, 3, 1]
    assert weights[0].tolist() == [0.5, 0.5, 0.0]
    assert ((chosen >= 0) & (chosen < 5)).all()


def test_pairs_lie_in_tiles_of_their_expert(rng: np.random.Generator) -> None:
    chosen = torch.from_numpy(rng.integers(0, 4, (13, 3)).astype(np.int32))
    chosen[chosen == 2] = 3  # an expert that nobody asks
    tiles = Tiles(64, 4, 4, 1, side_by_side=True)
    grouping = group_pairs(chosen, 6, 3, tiles)
    found = []
    for expert, pairs in zip(
        grouping.tile_experts.tolist(), grouping.pairs.view(-1, 4).tolist(), strict=True
    ):
        real = [p for p in pairs if p >= 0]
        assert bool(real) == (expert >= 0)
        assert all(chosen.flatten()[p] == expert for p in real)
        found += real
    assert sorted(found) == list(range(39))
