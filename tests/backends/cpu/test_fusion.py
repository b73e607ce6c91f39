"""Ops that share a kernel: which do, and that the bits are those of the ops one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest

from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.fusion import find_fusions
from localllm.backends.cpu.weights import Weights
from localllm.backends.direct import DirectRunner
from localllm.backends.program import Add, Norm, Program, Rope
from localllm.gguf import TensorType
from tests.backends.cpu.programs import CONTEXT, PROGRAMS, VOCAB, random_tensors

Kinds = Callable[[str], TensorType]
_O = TypeVar("_O")
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()


def quantized(name: str) -> TensorType:
    return TensorType.F32 if name == "router.weight" else TensorType.Q8_0


def one_in_floats(name: str) -> TensorType:
    return TensorType.F16 if name == "v.weight" else quantized(name)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(2)
    yield backend
    backend.close()


def of_type(program: Program, kind: type[_O]) -> list[_O]:
    return [op for op in program.ops if isinstance(op, kind)]


@pytest.mark.parametrize("kinds", [quantized, one_in_floats])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_of_the_ops_one_by_one(backend: CpuBackend, name: str, kinds: Kinds) -> None:
    program = PROGRAMS[name]()
    run = DirectRunner(backend, program, random_tensors(program, kinds), context=CONTEXT)
    for part in ((0, 0, TOKENS[:60]), (0, 60, TOKENS[60:61]), (0, 61, TOKENS[61:])):
        batch = run.batch([part])
        run.step.submit(batch)
        run.step.collect()
        fused = run.step.logits().copy()
        one_by_one = run.step.trace(batch)[-1]
        assert np.array_equal(fused, one_by_one)


def test_what_is_fused_where_nobody_else_reads() -> None:
    program = PROGRAMS["dense"]()
    found = find_fusions(program, Weights(program, random_tensors(program, quantized)))
    whole_rows = [op for op in of_type(program, Norm) if op.group == op.x.width]
    # What an attention block reads is also added to its output there.
    assert [found.panels[op.out].alone for op in whole_rows] == [False, True] * 3 + [True]
    assert {rope.out for rope in of_type(program, Rope)} <= found.absorbed
    assert {add.out for add in found.residuals.values()} <= found.absorbed
    assert found.residuals


def test_a_norm_that_is_read_in_two_formats_is_also_written_as_floats() -> None:
    program = Program({"embed": (8, 32), "norm": (32,), "a": (32, 32), "b": (32, 32)})
    h = program.norm(program.embed("embed"), "norm", 1e-5)
    both = program.linear(h, "a", "b", shard="none", biases=[None, None])
    program.finish(program.select_rows(both))

    def alone(kinds: Kinds) -> bool:
        weights = Weights(program, random_tensors(program, kinds))
        return find_fusions(program, weights).panels[h].alone

    assert alone(quantized)
    assert not alone(lambda name: TensorType.F16 if name == "b" else TensorType.Q8_0)


def test_a_sum_is_not_taken_over_before_its_other_part_is_known() -> None:
    program = Program({"embed": (8, 32), "w": (32, 32)})
    x = program.embed("embed")
    product = program.linear(x, "w", shard="none", biases=[None])
    later = program.scale(x, 2.0)
    program.finish(program.select_rows(program.add(later, product)))
    found = find_fusions(program, Weights(program, random_tensors(program, quantized)))
    assert not found.residuals
    assert not any(add.out in found.absorbed for add in of_type(program, Add))
