"""Whole programs on torch: against the reference, and against itself under any load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localllm.backends.base import Backend  # noqa: E402
from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.program import Program  # noqa: E402
from localllm.backends.reference import ReferenceBackend  # noqa: E402
from localllm.backends.torch_common.backend import TorchBackend  # noqa: E402
from localllm.gguf import Tensor, TensorType  # noqa: E402
from tests.backends.cpu.programs import (  # noqa: E402
    CONTEXT,
    PROGRAMS,
    VOCAB,
    nmse,
    random_tensors,
    second_halves,
)

pytestmark = pytest.mark.torch

# Across a partition of 256 positions, and with lengths that no tile divides.
LENGTHS = (270, 3, 41, 17)
SEQUENCES = [
    np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    for seed, length in enumerate(LENGTHS)
]
DTYPES = ("float32", "bfloat16", "float16")


def mixed(name: str) -> TensorType:
    """As files do it: formats differ within one fused projection; floats come in three."""
    kinds = {"q.weight": TensorType.Q4_0, "v.weight": TensorType.F16, "up.weight": TensorType.BF16}
    return kinds.get(name, TensorType.F32 if name == "router.weight" else TensorType.Q8_0)


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def runner(backend: Backend, program: Program, tensors: dict[str, Tensor]) -> DirectRunner:
    return DirectRunner(
        backend, program, tensors, context=CONTEXT + 256, max_seqs=len(SEQUENCES), max_tokens=400
    )


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-10), ("bfloat16", 5e-3)])
def test_every_op_agrees_with_the_reference(program: Program, dtype: str, limit: float) -> None:
    tensors = random_tensors(program, mixed)
    ours = runner(TorchBackend(dtype=dtype), program, tensors)
    theirs = runner(ReferenceBackend(), program, tensors)
    actual, expected = (run.step.trace(second_halves(run, SEQUENCES)) for run in (ours, theirs))
    assert len(actual) == len(expected) == len(program.ops)
    for op, a, e in zip(program.ops, actual, expected, strict=True):
        assert a.shape == e.shape, op
        assert a.dtype == np.float32, op
        assert np.isfinite(a).all(), op
        assert nmse(a, e) < limit, op


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bytes_under_any_load(program: Program, dtype: str) -> None:
    tensors = random_tensors(program, mixed)
    alone = runner(TorchBackend(dtype=dtype, threads=1), program, tensors)
    expected = [alone.logits(tokens, chunk=len(tokens))[0] for tokens in SEQUENCES]
    for threads, chunk in ((1, 64), (2, [45, 1, 13, 2])):
        together = runner(TorchBackend(dtype=dtype, threads=threads), program, tensors)
        for a, e in zip(together.logits(*SEQUENCES, chunk=chunk), expected, strict=True):
            assert np.array_equal(a, e), (threads, chunk)


def test_a_step_without_logit_rows(program: Program) -> None:
    run = runner(TorchBackend(), program, random_tensors(program, mixed))
    batch = run.batch([(0, 0, SEQUENCES[0])])
    batch.logit_rows = batch.logit_rows[:0]
    batch.sampling = type(batch.sampling).greedy(0)
    run.step.submit(batch)
    assert run.step.collect().size == 0
    assert run.step.logits().shape == (0, VOCAB)


def test_a_batch_that_is_too_large_is_refused(program: Program) -> None:
    run = runner(TorchBackend(), program, random_tensors(program, mixed))
    with pytest.raises(ValueError, match="450 tokens, the step was compiled for 400"):
        run.step.submit(run.batch([(0, 0, SEQUENCES[0]), (1, 0, SEQUENCES[1] * 60)]))
