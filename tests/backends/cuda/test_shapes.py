"""The shapes that steps are filled up to, and the graphs that are kept of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from localllm.backends.base import StepLimits
from localllm.backends.cuda.graphs import Graphs
from localllm.backends.cuda.shapes import Shapes, StepShape
from localllm.backends.cuda.staging import Staging

pytestmark = pytest.mark.torch


def test_steps_of_one_token_each_are_filled_up() -> None:
    shapes = Shapes(StepLimits(tokens=512, seqs=20, logit_rows=64, context=5000))
    assert shapes.seqs() == [1, 2, 4, 8, 16, 20]
    filled = {n: shapes.filled(StepShape(n, n, n, 2048)) for n in (1, 3, 16, 17, 20)}
    assert {n: shape.seqs for n, shape in filled.items() if shape} == {
        1: 1, 3: 4, 16: 16, 17: 20, 20: 20,
    }  # fmt: skip
    assert shapes.filled(StepShape(3, 3, 1, 2048)) == StepShape(4, 4, 4, 2048)
    assert shapes.filled(StepShape(4, 3, 3, 2048)) is None, "a chunk of a prompt"
    assert shapes.filled(StepShape(3, 3, 4, 2048)) is None


def test_contexts_come_in_few_sizes() -> None:
    shapes = Shapes(StepLimits(tokens=8, seqs=8, logit_rows=8, context=40_000))
    sizes = [shapes._context(n) for n in (1, 2048, 2049, 8192, 8193, 32_769, 40_000)]
    assert sizes == [2048, 2048, 8192, 8192, 32_768, 40_192, 40_192]
    small = Shapes(StepLimits(tokens=8, seqs=8, logit_rows=8, context=100))
    assert small._context(100) == 256


@pytest.mark.parametrize("limits", [StepLimits(4, 9, 9, 64), StepLimits(9, 9, 4, 64)])
def test_no_shape_is_larger_than_any_limit(limits: StepLimits) -> None:
    assert max(Shapes(limits).seqs()) == 4


def test_pieces_lie_where_they_lay_before() -> None:
    staging = Staging(torch.device("cpu"), 1000)
    first, at = staging.take(0, (3,), np.dtype(np.int32))
    second, end = staging.take(at, (2, 5), np.dtype(np.uint64))
    first.host[:], second.host[:] = 7, 2**64 - 1
    staging.send(end)
    assert first.device.tolist() == [7, 7, 7]
    assert second.device.tolist() == [[-1] * 5] * 2
    again, _ = staging.take(at, (2, 5), np.dtype(np.uint64))
    assert again.device.data_ptr() == second.device.data_ptr()
    assert at % 64 == end % 64 == 0


class FakeGraph:
    """Records what a test appends to `calls`, as CUDA does launches."""

    def replay(self) -> None:
        calls.append("replay")


calls: list[str] = []


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    @contextmanager
    def recording(_graph: FakeGraph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        calls.append("record")
        yield

    calls.clear()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return Graphs(torch.device("cuda"))


ONE, TWO = (StepShape(n, n, n, 2048) for n in (1, 2))


def test_a_graph_is_recorded_once_for_a_shape(graphs: Graphs) -> None:
    for shape in (ONE, ONE, TWO, ONE):
        graphs.run(shape, lambda: calls.append("work"))
        calls.append("|")
    text = " ".join(calls)
    assert text == "work record work | replay | work record work | replay |"


def test_what_cannot_be_recorded_runs_without(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        if calls[-1:] == ["record"]:
            calls.append("failure")
            raise torch.OutOfMemoryError("out of memory\nand more")
        calls.append("work")

    with caplog.at_level(logging.WARNING, "localllm"):
        for _ in range(3):
            graphs.run(ONE, work)
    assert calls == ["work", "record", "failure", "work", "work"]
    assert "steps of 1 sequences run without a graph: out of memory" in caplog.text
    assert len(caplog.records) == 1
