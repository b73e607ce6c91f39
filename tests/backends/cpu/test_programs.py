"""Whole programs on the CPU backend: against the reference, and against itself under any load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.direct import DirectRunner
from localllm.backends.program import Program
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import Tensor, TensorType
from tests.backends.cpu.programs import (
    CONTEXT,
    PROGRAMS,
    VOCAB,
    nmse,
    random_tensors,
    second_halves,
)

SEQUENCES = [
    np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    for seed, length in enumerate((70, 3, 41, 17))
]


def all_f32(name: str) -> TensorType:
    return TensorType.F32


def mixed(name: str) -> TensorType:
    """As files do it: formats differ within one fused projection."""
    kinds = {"q.weight": TensorType.Q4_0, "v.weight": TensorType.F16, "router.weight": all_f32("")}
    return kinds.get(name, TensorType.Q8_0)


def four_bits(name: str) -> TensorType:
    return TensorType.F32 if name == "router.weight" else TensorType.MXFP4


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]()


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[int, CpuBackend]]:
    made = {threads: CpuBackend(threads) for threads in (1, 2, 3)}
    yield made
    for backend in made.values():
        backend.close()


def runner(
    backend: CpuBackend | ReferenceBackend, program: Program, tensors: dict[str, Tensor]
) -> DirectRunner:
    return DirectRunner(
        backend, program, tensors, context=CONTEXT, max_seqs=len(SEQUENCES), max_tokens=150
    )


# The cache's float16 keys and values limit the one, 8-bit activations the other.
@pytest.mark.parametrize(
    ("kinds", "limit"), [(all_f32, 1e-6), (mixed, 2.5e-3), (four_bits, 2.5e-3)]
)
def test_every_op_agrees_with_the_reference(
    backends: dict[int, CpuBackend],
    program: Program,
    kinds: Callable[[str], TensorType],
    limit: float,
) -> None:
    tensors = random_tensors(program, kinds)
    ours, theirs = (
        runner(backends[2], program, tensors),
        runner(ReferenceBackend(), program, tensors),
    )
    actual, expected = (run.step.trace(second_halves(run, SEQUENCES)) for run in (ours, theirs))
    assert len(actual) == len(expected) == len(program.ops)
    for op, a, e in zip(program.ops, actual, expected, strict=True):
        assert a.shape == e.shape, op
        assert np.isfinite(a).all(), op
        assert nmse(a, e) < limit, op


def test_the_same_bytes_under_any_load(backends: dict[int, CpuBackend], program: Program) -> None:
    tensors = random_tensors(program, mixed)
    alone = runner(backends[1], program, tensors)
    expected = [alone.logits(tokens, chunk=len(tokens))[0] for tokens in SEQUENCES]
    loads: Sequence[int | list[int]] = (1, 7, 64, [5, 1, 33, 2])
    for threads, backend in backends.items():
        together = runner(backend, program, tensors)
        for chunk in loads:
            for a, e in zip(together.logits(*SEQUENCES, chunk=chunk), expected, strict=True):
                assert np.array_equal(a, e), (threads, chunk)


def test_a_step_without_logit_rows(backends: dict[int, CpuBackend], program: Program) -> None:
    run = runner(backends[2], program, random_tensors(program, mixed))
    batch = run.batch([(0, 0, SEQUENCES[0])])
    empty = run.batch([(0, 0, SEQUENCES[0][:1])])
    batch.logit_rows = empty.logit_rows[:0]
    batch.sampling = type(batch.sampling).greedy(0)
    run.step.submit(batch)
    assert run.step.collect().size == 0
    assert run.step.logits().shape == (0, VOCAB)


def test_greedy_tokens_are_the_largest_logits(
    backends: dict[int, CpuBackend], program: Program
) -> None:
    run = runner(backends[3], program, random_tensors(program, mixed))
    run.step.submit(run.batch([(0, 0, SEQUENCES[0])]))
    tokens = run.step.collect()
    assert np.array_equal(tokens, run.step.logits().argmax(axis=1))


def test_the_workspace_is_what_was_announced(backends: dict[int, CpuBackend]) -> None:
    program, backend = PROGRAMS["dense"](), backends[2]
    run = runner(backend, program, random_tensors(program, mixed))
    from localllm.backends.base import StepLimits

    announced = backend.workspace_bytes(program, StepLimits(150, 4, 150, CONTEXT))
    assert announced == run.step._workspace.nbytes  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="load"):
        backend.workspace_bytes(PROGRAMS["dense"](), StepLimits(1, 1, 1, 16))
