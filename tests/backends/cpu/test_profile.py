"""The breakdown of a step accounts for every call, and counts what the ops cannot do without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localllm.backends.base import Batch
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.machine import Machine
from localllm.backends.cpu.matmul import FORMATS
from localllm.backends.cpu.profile import Share, Work, break_down
from localllm.backends.cpu.step import CpuStep
from localllm.backends.direct import DirectRunner, Part
from localllm.backends.program import Attention, Linear, Program
from localllm.gguf import TensorType
from tests.backends.cpu.programs import CONTEXT, HEAD, HEADS, KV_HEADS, dense, random_tensors

LENGTHS = (50, 9)  # tokens known of each sequence before the step
NEW = (7, 1)


def kinds(name: str) -> TensorType:
    return {"v.weight": TensorType.F16, "q.weight": TensorType.Q4_0}.get(name, TensorType.Q8_0)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def program() -> Program:
    return dense()


@pytest.fixture(scope="module")
def runner(backend: CpuBackend, program: Program) -> DirectRunner:
    tensors = random_tensors(program, kinds)
    return DirectRunner(backend, program, tensors, context=CONTEXT, max_seqs=2, max_tokens=80)


@pytest.fixture(scope="module")
def batch(runner: DirectRunner) -> Batch:
    """Two sequences with some tokens behind them."""
    past: list[Part] = [(i, 0, [1] * length) for i, length in enumerate(LENGTHS)]
    runner.step.submit(runner.batch(past))
    runner.step.collect()
    return runner.batch([(i, LENGTHS[i], [2] * new) for i, new in enumerate(NEW)])


@pytest.fixture(scope="module")
def shares(runner: DirectRunner, batch: Batch) -> dict[str, Share]:
    assert isinstance(runner.step, CpuStep)
    return {share.kind: share for share in break_down(runner.step, batch, repeats=3)}


def test_every_call_is_counted_once(runner: DirectRunner, batch: Batch) -> None:
    assert isinstance(runner.step, CpuStep)
    calls = runner.step.profile(batch)
    shares = break_down(runner.step, batch, repeats=2)
    assert sum(share.calls for share in shares) == len(calls)
    assert all(nanoseconds >= 0 for _, nanoseconds in calls)
    assert [s.seconds for s in shares] == sorted((s.seconds for s in shares), reverse=True)


def test_matmuls_read_their_weights_and_multiply_all_columns(
    program: Program, shares: dict[str, Share]
) -> None:
    expected = {kind: Work() for kind in (TensorType.Q8_0, TensorType.Q4_0, TensorType.F16)}
    for op in program.ops:
        if isinstance(op, Linear):
            for name in op.weights:
                kind, (rows, cols) = kinds(name), program.shapes[name]
                n_bytes, products = FORMATS[kind].packed_bytes(rows, cols), rows * cols * sum(NEW)
                floats = kind is TensorType.F16
                expected[kind] += Work(n_bytes, products * (not floats), products * floats)
    for kind, work in expected.items():
        assert shares[f"matmul {kind.name}"].work == work


def test_attention_reads_what_is_in_reach(program: Program, shares: dict[str, Share]) -> None:
    products = positions = 0
    for op in program.ops:
        if isinstance(op, Attention):
            for length, new in zip(LENGTHS, NEW, strict=True):
                reach = [
                    {p for p in range(at + 1) if op.window is None or p > at - op.window}
                    for at in range(length, length + new)
                ]
                products += 2 * HEADS * HEAD * sum(map(len, reach))
                positions += len(set().union(*reach))
    n_bytes = positions * KV_HEADS * 2 * HEAD * 2  # keys and values of two bytes
    assert shares["attention"].work == Work(n_bytes, f32_products=products)


def test_other_kinds_have_names_and_no_floor(shares: dict[str, Share]) -> None:
    others = {kind: s for kind, s in shares.items() if not kind.startswith(("matmul", "attention"))}
    assert {"quantize", "embedding", "norm, quantize", "rope, KV store", "sampling"} <= set(others)
    machine = Machine(1.0, 1.0, 1.0)
    assert all(s.floor(machine) == 0 and s.bound(machine) == "" for s in others.values())


def test_the_floor_is_the_slower_of_reading_and_multiplying() -> None:
    share = Share("matmul Q4_0", 1, 1.0, Work(bytes=100, int8_products=60, f32_products=20))
    assert share.floor(Machine(10, 100, 100)) == pytest.approx(10)
    assert share.bound(Machine(10, 100, 100)) == "reads"
    assert share.floor(Machine(1000, 10, 10)) == pytest.approx(8)
    assert share.bound(Machine(1000, 10, 10)) == "products"


def test_profiling_changes_no_result(runner: DirectRunner, batch: Batch) -> None:
    step = runner.step
    assert isinstance(step, CpuStep)
    step.submit(batch)
    tokens, logits = step.collect(), step.logits().copy()
    step.profile(batch)
    np.testing.assert_array_equal(step.logits(), logits)
    step.submit(batch)
    np.testing.assert_array_equal(step.collect(), tokens)
