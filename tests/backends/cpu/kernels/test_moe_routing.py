"""Routing to experts against numpy, and each token's independence of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.cpu.kernel import ROWS_TOKENS
from localllm.backends.cpu.kernels.moe_routing import (
    SIGMOID,
    SOFTMAX,
    CombineArgs,
    OrderArgs,
    RouteArgs,
    combine_experts,
    order_by_expert,
    route,
)
from tests.backends.cpu.kernels.harness import Header, address, run

Gating = Literal["softmax", "sigmoid"]


@dataclass
class Routing:
    expert: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]
    gather: npt.NDArray[np.int32]
    segment_start: npt.NDArray[np.int64]
    position: npt.NDArray[np.int32]


def routed(
    logits: npt.NDArray[np.float32],
    used: int,
    gating: Gating = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    threads: int = 1,
) -> Routing:
    t, experts = logits.shape
    found = Routing(
        np.full((t, used), -1, np.int32),
        np.full((t, used), np.nan, np.float32),
        np.full(t * used, -1, np.int32),
        np.full(experts + 1, -1, np.int64),
        np.full((t, used), -1, np.int32),
    )
    scratch = np.empty((threads, experts), np.float32)
    header = Header(tokens=t)
    words = RouteArgs(
        logits=address(logits),
        logits_stride=experts,
        row_kind=ROWS_TOKENS,
        experts=experts,
        used=used,
        gating={"softmax": SOFTMAX, "sigmoid": SIGMOID}[gating],
        normalize=normalize,
        scale=scale,
        expert=address(found.expert),
        weight=address(found.weight),
        scratch=address(scratch),
    )
    run(route, words, header, threads)
    order = OrderArgs(
        row_kind=ROWS_TOKENS,
        experts=experts,
        used=used,
        expert=address(found.expert),
        gather=address(found.gather),
        segment_start=address(found.segment_start),
        position=address(found.position),
    )
    run(order_by_expert, order, header, threads)
    return found


def random_logits(t: int, experts: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(5).standard_normal((t, experts)) * 2).astype(np.float32)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("t", "experts", "used"), [(1, 6, 2), (33, 6, 2), (20, 128, 8), (5, 4, 4)])
def test_agrees_with_numpy(
    t: int, experts: int, used: int, gating: Gating, normalize: bool
) -> None:
    logits = random_logits(t, experts)
    found = routed(logits, used, gating, normalize, scale=2.5, threads=2)
    x = logits.astype(np.float64)
    gates = 1 / (1 + np.exp(-x)) if gating == "sigmoid" else np.exp(x)
    if gating == "softmax":
        gates /= gates.sum(1, keepdims=True)
    chosen = np.argsort(-gates, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(gates, chosen, 1)
    if normalize:
        weights /= weights.sum(1, keepdims=True)
    np.testing.assert_array_equal(found.expert, chosen)
    np.testing.assert_allclose(found.weight, weights * 2.5, rtol=1e-6)


def test_ties_go_to_the_lower_index() -> None:
    logits = np.array([[1, 3, 3, 1, 3], [30, 40, 35, 50, 20]], np.float32)
    found = routed(logits, 4, "sigmoid", normalize=False)
    assert found.expert.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]  # the second row: all 1.0


def test_panel_rows_are_sorted_by_expert_then_row() -> None:
    found = routed(random_logits(40, 7), 3)
    pairs = [(e, row, j) for row, es in enumerate(found.expert.tolist()) for j, e in enumerate(es)]
    for panel_row, (expert, row, j) in enumerate(sorted(pairs)):
        assert found.gather[panel_row] == row
        assert found.position[row, j] == panel_row
        assert found.segment_start[expert] <= panel_row < found.segment_start[expert + 1]
    assert found.segment_start[0] == 0
    assert found.segment_start[-1] == 120


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random_logits(50, 16)
    together = routed(logits, 4, threads=3)
    for row in range(50):
        alone = routed(logits[row : row + 1], 4)
        np.testing.assert_array_equal(alone.expert[0], together.expert[row])
        np.testing.assert_array_equal(alone.weight[0], together.weight[row])


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_nan_stays_in_its_row(gating: Gating) -> None:
    logits = random_logits(3, 5)
    logits[1, 2] = np.nan
    found = routed(logits, 4, gating)
    assert np.isnan(found.weight[1]).any()
    assert np.isfinite(found.weight[[0, 2]]).all()
    assert len(set(found.expert[1].tolist())) == 4
    assert set(found.expert[1].tolist()) <= set(range(5))


@pytest.mark.parametrize("width", [8, 21, 64])
def test_combine_sums_in_order_of_the_weights(width: int) -> None:
    logits = random_logits(12, 6)
    found = routed(logits, 3)
    rng = np.random.default_rng(1)
    y = rng.standard_normal((36, width + 3)).astype(np.float32)
    out: npt.NDArray[Any] = np.full((12, width + 8), np.nan, np.float32)
    words = CombineArgs(
        y=address(y),
        y_stride=y.shape[1],
        row_kind=ROWS_TOKENS,
        used=3,
        weight=address(found.weight),
        position=address(found.position),
        out=address(out),
        out_stride=out.shape[1],
        width=width,
    )
    run(combine_experts, words, Header(tokens=12), 2)
    answers = y[found.position][..., :width].astype(np.float64)
    expected = np.einsum("tj,tjw->tw", found.weight.astype(np.float64), answers)
    np.testing.assert_allclose(out[:, :width], expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(out[:, width:]).all()
