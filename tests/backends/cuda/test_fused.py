"""Norms, activations and sums against the reference backend."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
import torch

from localllm.backends.cuda.kernels.elementwise import act_mul, activation, add
from localllm.backends.cuda.kernels.norm import norm
from localllm.backends.program import ActivationName
from localllm.backends.reference import ops

pytestmark = pytest.mark.torch


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("width", "group", "weight_size"),
    [(1, 1, 1), (100, 100, 100), (100, 100, 0), (96, 24, 24), (96, 24, 96)],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(
    kind: Literal["rms", "layer"],
    width: int,
    group: int,
    weight_size: int,
    with_bias: bool,
    with_residual: bool,
    rng: np.random.Generator,
) -> None:
    x, residual = normal(rng, 3, width + 7)[:, 3 : 3 + width], normal(rng, 3, width)
    weight = normal(rng, weight_size) if weight_size else None
    bias = normal(rng, weight_size or group) if with_bias else None
    out = torch.full((3, width), torch.nan)
    total = torch.empty(3, width) if with_residual else None
    norm(
        x, weight, bias, out, eps=1e-5, kind=kind, group=group,
        residual=residual if with_residual else None, sum_out=total,
    )  # fmt: skip
    summed = x + residual if with_residual else x
    expected = ops.norm(
        np.ascontiguousarray(summed.numpy()),
        None if weight is None else weight.numpy(),
        None if bias is None else bias.numpy(),
        eps=1e-5,
        kind=kind,
        group=group,
    )
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=2e-6)
    if total is not None:
        assert torch.equal(total, summed)


def test_norm_casts_and_may_add_in_place(rng: np.random.Generator) -> None:
    x, residual = normal(rng, 2, 64), normal(rng, 2, 64)
    out = torch.empty(2, 64, dtype=torch.float16)
    summed = x + residual
    norm(x, None, None, out, eps=0.0, kind="rms", group=64, residual=residual, sum_out=residual)
    assert torch.equal(residual, summed)
    expected = summed / summed.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(out.float(), expected, rtol=1e-3, atol=1e-3)


def test_a_sum_needs_its_place() -> None:
    x = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="residual"):
        norm(x, None, None, x, eps=1.0, kind="rms", group=4, residual=x)


@pytest.mark.parametrize("act", get_args(ActivationName))
@pytest.mark.parametrize("width", [1, 1030])
def test_activations(act: ActivationName, width: int, rng: np.random.Generator) -> None:
    both = normal(rng, 2, 2 * width) * 4
    both[0, 0], both[1, 0] = 150, -150
    gate, up = both[:, :width], both[:, width:]
    out, alone = torch.empty(2, width), torch.empty(2, width)
    act_mul(gate, up, out, act)
    activation(gate, alone, act)
    with np.errstate(over="ignore"):  # the reference's sigmoid of -150
        expected = ops.activate(gate.numpy(), act)
    np.testing.assert_allclose(alone.numpy(), expected, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(out.numpy(), expected * up.numpy(), rtol=1e-5, atol=3e-5)


def test_sums_round_once(rng: np.random.Generator) -> None:
    a, b = normal(rng, 3, 70), normal(rng, 3, 90)[:, 10:80]
    out = torch.empty(3, 70, dtype=torch.float16)
    add(a, b, out)
    assert torch.equal(out, (a + b).half())


def test_no_rows_are_no_launch() -> None:
    empty = torch.empty(0, 8)
    norm(empty, None, None, empty, eps=1.0, kind="rms", group=8)
    activation(empty, empty, "relu")
    add(empty, empty, empty)
