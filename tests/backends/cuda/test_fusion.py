"""What is fused and how values are kept follows from who reads them."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.cuda.fusion import find_fusions, narrow_buffers
from localllm.backends.program import (
    ActMul,
    Add,
    Attention,
    Linear,
    Moe,
    Norm,
    Program,
    Rope,
    RopeTable,
    Value,
)
from tests.backends.cpu.programs import PROGRAMS

pytestmark = pytest.mark.torch


def outs(program: Program, *kinds: type) -> list[Value]:
    return [op.out for op in program.ops if isinstance(op, kinds)]


def test_residuals_and_rotations_of_a_decoder_are_absorbed() -> None:
    program = PROGRAMS["dense"]()
    fusions = find_fusions(program)
    assert fusions.absorbed == set(outs(program, Add, Rope, ActMul))
    assert list(fusions.gates.values()) == [op for op in program.ops if isinstance(op, ActMul)]
    assert list(fusions.rotations) == outs(program, Attention)
    assert len(fusions.residuals) == len(outs(program, Add))


def test_what_only_matrices_read_is_kept_in_their_type() -> None:
    program = PROGRAMS["dense"]()
    narrow = narrow_buffers(program)
    to_matrices = [op.x.buffer for op in program.ops if isinstance(op, Linear)]
    gates = [op.gate.buffer for op in program.ops if isinstance(op, ActMul)]
    queries = [op.q.buffer for op in program.ops if isinstance(op, Attention)]
    added = {v.buffer for op in program.ops if isinstance(op, Add) for v in (op.a, op.b)}
    assert narrow == {*to_matrices, *gates, *queries} - added
    assert len(narrow) >= 3 * 5
    assert program.logits is not None
    assert program.logits.buffer not in narrow
    keys = [op.k.buffer for op in program.ops if isinstance(op, Attention)]
    assert not narrow.intersection(keys)


def test_what_chooses_experts_is_precise() -> None:
    program = PROGRAMS["experts"]()
    assert program.routers() == {"router.weight"}
    narrow = narrow_buffers(program)
    for op in program.ops:
        if isinstance(op, Moe):
            assert op.x.buffer not in narrow, "the router reads it too"
            assert op.logits.buffer not in narrow


def square(width: int = 32) -> Program:
    return Program({"w": (width, width), "n": (width,), "embed": (9, width)})


def test_a_product_that_is_read_twice_is_stored() -> None:
    p = square()
    x = p.embed("embed")
    y = p.linear(x, "w", shard="none", biases=[None])
    total = p.add(x, y)
    p.finish(p.add(total, y))
    assert not find_fusions(p).residuals


def test_a_sum_with_itself_or_with_what_comes_later_is_no_residual() -> None:
    p = square()
    x = p.embed("embed")
    y = p.linear(x, "w", shard="none", biases=[None])
    z = p.norm(x, "n", 1e-5)
    p.finish(p.norm(p.add(y, z), "n", 1e-5))
    assert not find_fusions(p).residuals
    q = square()
    y = q.linear(q.embed("embed"), "w", shard="none", biases=[None])
    q.finish(q.norm(q.add(y, y), "n", 1e-5))
    assert not find_fusions(q).residuals


@pytest.mark.parametrize("same", [True, False])
def test_queries_and_keys_turn_with_the_store_where_they_turn_alike(same: bool) -> None:
    p = square()
    tables = [RopeTable(np.ones(8)) for _ in range(2)]
    x = p.embed("embed")
    q, k = p.rope(x, 16, tables[0]), p.rope(x, 16, tables[0 if same else 1])
    p.finish(p.norm(p.attention(q, k, x, head_dim=16, scale=1.0), "n", 1e-5))
    assert bool(find_fusions(p).rotations) == same


@pytest.mark.parametrize("case", ["swapped", "one half", "read again", "normed", "plain"])
def test_halves_are_multiplied_by_their_product_where_nothing_else_reads_them(case: str) -> None:
    p = Program({"w": (32, 32), "v": (32, 16), "n": (16,), "embed": (9, 32)})
    both = p.linear(p.embed("embed"), "w", shard="none", biases=[None])
    gate, up = p.split(both, 16, 16)
    if case == "swapped":
        gate, up = up, gate
    y = p.act_mul(gate, gate if case == "one half" else up, "silu")
    if case == "normed":  # the type of the sums is not that of the halves
        y = p.norm(y, "n", 1e-5)
    x = p.linear(y, "v", shard="none", biases=[None])
    p.finish(p.add(x, both) if case == "read again" else x)
    assert bool(find_fusions(p).gates) == (case == "plain")


def test_selected_rows_are_kept_as_their_readers_want_them() -> None:
    p = square()
    x = p.norm(p.embed("embed"), "n", 1e-5)
    rows = p.select_rows(x)
    p.finish(p.linear(rows, "w", shard="none", biases=[None]))
    assert narrow_buffers(p) == {x.buffer, rows.buffer}
    q = square()
    x = q.norm(q.embed("embed"), "n", 1e-5)
    q.finish(q.norm(q.select_rows(x), "n", 1e-5))
    assert narrow_buffers(q) == frozenset()
    assert len(outs(q, Norm)) == 2
