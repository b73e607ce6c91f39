"""Cutting programs between layers."""

from __future__ import annotations

import pytest

from localllm.backends.parallel.stages import split
from localllm.backends.program import Attention, Program, Receive, Send, op_weights
from localllm.errors import RequestError
from localllm.gguf import TensorType
from tests.backends.cpu.programs import PROGRAMS, random_tensors


@pytest.mark.parametrize("name", ["dense", "plain"])
def test_stages_are_the_program_in_turn(name: str) -> None:
    program = PROGRAMS[name]()
    tensors = random_tensors(program, lambda _: TensorType.F32)
    parts = split(program, tensors, 2)
    kinds = [type(op) for part in parts for op in part.ops if not isinstance(op, Send | Receive)]
    assert kinds == [type(op) for op in program.ops]
    assert isinstance(parts[0].ops[-1], Send)
    assert isinstance(parts[1].ops[0], Receive)
    assert parts[0].ops[-1].out.width == parts[1].ops[0].out.width
    assert parts[0].logits is None
    assert parts[1].logits is not None


def test_each_stage_has_all_kv_groups_and_its_own_layers_of_them() -> None:
    program = PROGRAMS["dense"]()  # one layer with a window, two without
    first, second, third = split(program, random_tensors(program, lambda _: TensorType.F32), 3)
    counts = [[len(group.layers) for group in part.kv_groups] for part in (first, second, third)]
    assert counts == [[1, 0], [0, 1], [0, 1]]
    for part in (first, second, third):
        assert [group.window for group in part.kv_groups] == [24, None]
        assert [op.layer for op in part.ops if isinstance(op, Attention)] == [0]


def test_buffers_are_numbered_anew() -> None:
    program = PROGRAMS["dense"]()
    for part in split(program, random_tensors(program, lambda _: TensorType.F32), 3):
        assert [op.out.buffer for op in part.ops] == list(range(len(part.buffers)))


def test_a_program_of_one_stage_is_itself() -> None:
    program = PROGRAMS["dense"]()
    (part,) = split(program, random_tensors(program, lambda _: TensorType.F32), 1)
    assert part.ops == program.ops
    assert part.buffers == program.buffers
    assert part.kv_groups == program.kv_groups
    assert part.logits == program.logits


def test_the_heaviest_stage_is_as_light_as_can_be() -> None:
    """Seven layers of which the first is as heavy as three others."""
    shapes = {f"w{i}": (8, 8) for i in range(7)} | {"w0": (8, 8), "e": (32, 8)}
    program = Program(shapes)
    x = program.embed("e")
    for layer in range(7):
        h = program.linear(x, f"w{layer}", shard="row")
        if layer == 0:
            for _ in range(2):
                h = program.linear(h, "w0", shard="row")
        x = program.add(x, program.attention(h, h, h, head_dim=8, scale=1.0))
    program.finish(program.linear(program.select_rows(x), "e", shard="vocab"))
    tensors = random_tensors(program, lambda _: TensorType.F32)
    parts = split(program, tensors, 3)
    matrices = [
        sum(tensors[name].n_bytes for op in part.ops for name in op_weights(op)) // (8 * 8 * 4)
        for part in parts
    ]
    assert sum(matrices) == 4 + 3 + 6 + 4  # embedding, first layer, other layers, output
    assert max(matrices) == 4 + 3


def test_more_stages_than_layers_are_refused() -> None:
    program = PROGRAMS["dense"]()
    tensors = random_tensors(program, lambda _: TensorType.F32)
    with pytest.raises(RequestError, match=r"is 4, the model can be cut into 3 stages") as error:
        split(program, tensors, 4)
    assert error.value.param == "pipeline_parallel_size"
