"""Who gets which weights: every element somewhere, and nobody all of it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.parallel.shard import Piece, divide
from localllm.backends.parallel.slices import sliced
from localllm.backends.program import (
    AllGather,
    AllReduce,
    Attention,
    Linear,
    Program,
    Rope,
    Value,
)
from localllm.errors import RequestError, UnsupportedArchitectureError
from localllm.gguf import GGUFFile, Tensor, TensorType
from localllm.models import build_program, trained_context
from tests.backends.cpu.programs import PROGRAMS, random_tensors
from tests.helpers import ArchitectureCase, architecture_cases

Counts = dict[str, npt.NDArray[np.int64]]


def build(file: GGUFFile) -> Program:
    try:
        return build_program(file, trained_context(file))
    except UnsupportedArchitectureError as error:
        pytest.skip(str(error))


def float_tensors(program: Program) -> dict[str, Tensor]:
    return random_tensors(program, lambda _: TensorType.F32)


def copies(pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> Counts:
    """Of each weight that one of the pieces has, on how many of them each index of an axis is.

    No weight is cut along more than one axis.
    """
    counts: Counts = {}
    axes: dict[str, int] = {}
    for piece in pieces:
        for cut in piece.slices.values():
            shape = shapes[cut.name]
            axis = axes.setdefault(cut.name, cut.axis) if cut.parts else axes.get(cut.name, -1)
            assert not cut.parts or axis == cut.axis
            count = counts.setdefault(cut.name, np.zeros(shape[axis], np.int64))
            for start, end in cut.parts or ((0, shape[axis]),):
                count[start:end] += 1
    return counts


def check_consistent(piece: Piece, tensors: Mapping[str, Tensor]) -> None:
    """Shapes of weights, values and KV layers fit each other."""
    program = piece.program
    own = sliced(tensors, piece.slices)
    assert set(own) == set(program.weights())
    assert {name: tensor.shape for name, tensor in own.items()} == dict(program.shapes)
    made: set[int] = set()
    for op in program.ops:
        for value in vars(op).values():
            if isinstance(value, Value):
                width, rows = program.buffers[value.buffer]
                assert (value.stride, value.rows) == (width, rows)
                assert 0 < value.width <= width - value.offset
                assert value.buffer in made or value is op.out
        made.add(op.out.buffer)
        if isinstance(op, Linear):
            assert op.out.width == sum(program.shapes[name][0] for name in op.weights)
            assert all(program.shapes[name][1] == op.x.width for name in op.weights)
        if isinstance(op, Attention):
            layer = program.kv_groups[op.group].layers[op.layer]
            assert op.k.width == layer.kv_heads * layer.key_dim
            assert op.v.width == layer.kv_heads * layer.value_dim
            assert op.q.width // op.head_dim * op.value_dim == op.out.width
            assert op.q.width // op.head_dim % layer.kv_heads == 0


@pytest.mark.parametrize("case", architecture_cases(), ids=lambda case: case.name)
def test_all_weights_are_somewhere_and_nobody_has_all(case: ArchitectureCase) -> None:
    with GGUFFile.open(case.gguf) as file:
        program = build(file)
        whole = program.routers()
        for stages in (1, 2):
            pieces = divide(program, file.tensors, 2, stages)
            for stage in pieces:
                for piece in stage:
                    check_consistent(piece, file.tensors)
                for name, count in copies(stage, program.shapes).items():
                    cut = len(program.shapes[name]) > 1 and name not in whole
                    if name.endswith(("attn_k.weight", "attn_v.weight", "attn_qkv.weight")):
                        assert (count >= 1).all(), name  # KV heads may be needed by both
                    elif "norm" not in name and cut:
                        assert (count == 1).all(), name
                    else:
                        assert (count >= 1).all(), name
            named = {cut.name for stage in pieces for p in stage for cut in p.slices.values()}
            assert named == set(program.weights())
            total = sum(file.tensors[name].n_bytes for name in program.weights())
            for piece in (piece for stage in pieces for piece in stage):
                own = sliced(file.tensors, piece.slices)
                assert sum(tensor.n_bytes for tensor in own.values()) < 0.6 * total


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", range(1, 7))
def test_small_programs_at_all_sizes(name: str, ranks: int) -> None:
    program = PROGRAMS[name]()
    tensors = float_tensors(program)
    ((*pieces,),) = divide(program, tensors, ranks, 1)
    for piece in pieces:
        check_consistent(piece, tensors)
    for weight, count in copies(pieces, program.shapes).items():
        assert (count >= 1).all(), weight


def test_more_ranks_than_heads_are_refused() -> None:
    program = PROGRAMS["dense"]()
    with pytest.raises(RequestError, match=r"is 7, the largest .* without heads is 6") as error:
        divide(program, float_tensors(program), 7, 1)
    assert error.value.param == "tensor_parallel_size"


def test_one_rank_has_the_program_itself() -> None:
    program = PROGRAMS["dense"]()
    ((piece,),) = divide(program, float_tensors(program), 1, 1)
    assert piece.program.ops == program.ops
    assert all(name == cut.name and not cut.parts for name, cut in piece.slices.items())


def test_the_embedding_and_the_tied_output_are_the_same_rows() -> None:
    program = PROGRAMS["dense"]()
    ((*pieces,),) = divide(program, float_tensors(program), 3, 1)
    cuts = [
        [cut for cut in piece.slices.values() if cut.name == "embed.weight"] for piece in pieces
    ]
    assert [cut.parts for (cut,) in cuts] == [((0, 32),), ((32, 64),), ((64, 101),)]


def test_a_bias_after_a_sum_is_added_once() -> None:
    shapes = {"e": (64, 64), "up": (128, 64), "down": (64, 128), "bias": (64,)}
    program = Program(shapes)
    h = program.activation(program.linear(program.embed("e"), "up", shard="column"), "silu")
    x = program.linear(h, "down", shard="row", biases=["bias"])
    program.finish(program.linear(program.select_rows(x), "e", shard="vocab"))
    ((*pieces,),) = divide(program, float_tensors(program), 2, 1)
    biases = [
        [op.biases for op in piece.program.ops if isinstance(op, Linear) and "down" in op.weights]
        for piece in pieces
    ]
    assert biases == [[("bias",)], [(None,)]]


def collectives(piece: Piece) -> list[type]:
    kinds = (AllReduce, AllGather)
    return [type(op) for op in piece.program.ops if isinstance(op, kinds)]


def feed_forward(kind: TensorType) -> tuple[Program, dict[str, Tensor]]:
    program = Program({"e": (64, 32), "up": (96, 32), "down": (32, 96)})
    h = program.activation(program.linear(program.embed("e"), "up", shard="column"), "silu")
    x = program.linear(h, "down", shard="row")
    program.finish(program.linear(program.select_rows(x), "e", shard="vocab"))
    return program, random_tensors(program, lambda name: kind if name == "down" else TensorType.F32)


def test_columns_are_gathered_where_blocks_cannot_be_cut() -> None:
    """Ninety-six columns are three blocks of 32, too few for four ranks."""
    program, tensors = feed_forward(TensorType.F32)
    assert collectives(divide(program, tensors, 4, 1)[0][0]) == [AllReduce, AllReduce, AllGather]
    program, tensors = feed_forward(TensorType.Q8_0)
    assert collectives(divide(program, tensors, 3, 1)[0][0]) == [AllReduce, AllReduce, AllGather]
    pieces = divide(program, tensors, 4, 1)[0]
    assert collectives(pieces[0]) == [AllReduce, AllGather, AllGather, AllGather]
    assert all((count == 1).all() for count in copies(pieces, program.shapes).values())


def test_a_norm_over_all_heads_leaves_attention_whole_and_its_weights_cut() -> None:
    shapes = {"e": (64, 64), "q": (64, 64), "n": (64,), "o": (64, 64)}
    program = Program(shapes)
    q = program.norm(program.linear(program.embed("e"), "q", shard="column"), "n", 1e-5)
    x = program.linear(program.attention(q, q, q, head_dim=16, scale=1.0), "o", shard="row")
    program.finish(program.linear(program.select_rows(x), "e", shard="vocab"))
    pieces = divide(program, float_tensors(program), 2, 1)[0]
    for piece in pieces:
        (attention,) = (op for op in piece.program.ops if isinstance(op, Attention))
        assert attention.q.width == 64
    counts = copies(pieces, shapes)
    assert all((counts[name] == 1).all() for name in "eqo")


def test_experts_whose_blocks_cannot_be_cut_are_whole_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = PROGRAMS["experts"]()
    tensors = random_tensors(
        program, lambda name: TensorType.Q8_0 if name == "down.weight" else TensorType.F32
    )
    with caplog.at_level("INFO"):
        ((*pieces,),) = divide(program, tensors, 4, 1)  # 96 columns are three blocks
    assert (copies(pieces, program.shapes)["down.weight"] == 4).all()
    assert [record.message for record in caplog.records] == [
        "gate.weight and 2 more cannot be divided among 4 ranks: each has all of it"
    ]


def test_one_weight_in_two_roles_goes_by_two_names() -> None:
    """As a whole vector, and cut by heads."""
    shapes = {"e": (64, 64), "n": (64,), "q": (64, 64), "o": (64, 64)}
    program = Program(shapes)
    h = program.norm(program.embed("e"), "n", 1e-5)
    q = program.norm(program.linear(h, "q", shard="column"), "n", 1e-5, group=16)
    x = program.linear(program.attention(q, q, q, head_dim=16, scale=1.0), "o", shard="row")
    program.finish(program.linear(program.select_rows(x), "e", shard="vocab"))
    tensors = float_tensors(program)
    piece = divide(program, tensors, 2, 1)[0][1]
    own = sliced(tensors, piece.slices)
    assert np.array_equal(own["n"].dequantize(), tensors["n"].dequantize())
    assert np.array_equal(own["n#2"].dequantize(), tensors["n"].dequantize()[32:])


def test_a_piece_survives_pickling() -> None:
    program = PROGRAMS["dense"]()
    piece = divide(program, float_tensors(program), 2, 2)[1][1]
    copy = pickle.loads(pickle.dumps(piece))
    assert copy.slices == piece.slices
    assert copy.program.buffers == piece.program.buffers
    tables = {id(op.table) for op in copy.program.ops if isinstance(op, Rope)}
    assert len(tables) == 1  # ops that share one still do
