"""What a program holds for a good file, and how a bad one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.backends.program import (
    ActMul,
    Attention,
    Embed,
    Linear,
    Moe,
    Norm,
    Rope,
    SelectRows,
    Value,
)
from localllm.errors import GGUFError, ModelError, UnsupportedArchitectureError
from localllm.gguf import GGUFFile
from localllm.models import trained_context
from tests.models.tiny import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    KeyValue,
    TinyModel,
    ops_of,
)


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


def test_a_llama_uses_all_its_tensors_once(model: TinyModel, tmp_path: Path) -> None:
    program = model.build(tmp_path)
    assert set(program.weights()) == set(model.tensors)
    assert program.logits is not None
    assert (program.logits.width, program.logits.rows) == (VOCAB, "R")
    (group,) = program.kv_groups
    assert group.window is None
    assert [(kv.kv_heads, kv.key_dim, kv.value_dim) for kv in group.layers] == [
        (KV_HEADS, HEAD_DIM, HEAD_DIM)
    ] * LAYERS


def test_trained_context(model: TinyModel, tmp_path: Path) -> None:
    with GGUFFile.open(model.write(tmp_path)) as file:
        assert trained_context(file) == CONTEXT


def test_every_layer_shares_one_rotation(model: TinyModel, tmp_path: Path) -> None:
    ropes = ops_of(model.build(tmp_path), Rope)
    assert len(ropes) == 2 * LAYERS
    assert len({id(op.table) for op in ropes if isinstance(op, Rope)}) == 1


def test_values_are_read_after_they_are_written(model: TinyModel, tmp_path: Path) -> None:
    written: set[int] = set()
    for op in model.build(tmp_path).ops:
        values = {name: v for name, v in vars(op).items() if isinstance(v, Value)}
        out = values.pop("out")
        assert {value.buffer for value in values.values()} <= written
        assert out.buffer not in written
        written.add(out.buffer)


def test_the_last_feed_forward_sees_only_rows_that_need_logits(
    model: TinyModel, tmp_path: Path
) -> None:
    program = model.build(tmp_path)
    assert len(ops_of(program, SelectRows)) == 2  # the residual stream and attention's answer
    first, last = ops_of(program, ActMul)
    assert (first.out.rows, last.out.rows) == ("T", "R")
    assert all(op.out.rows == "T" for op in ops_of(program, Attention))


def test_a_missing_output_matrix_means_the_embedding(model: TinyModel, tmp_path: Path) -> None:
    del model.tensors["output.weight"]
    program = model.build(tmp_path)
    embed, head = program.ops[0], program.ops[-1]
    assert isinstance(embed, Embed)
    assert isinstance(head, Linear)
    assert head.weights == (embed.weight,)


def test_biases_and_head_norms_are_used_where_the_file_has_them(
    model: TinyModel, tmp_path: Path
) -> None:
    model.tensors |= {
        "blk.0.attn_q.bias": (HEADS * HEAD_DIM,),
        "blk.1.attn_k_norm.weight": (HEAD_DIM,),
        "blk.1.attn_norm.bias": (WIDTH,),
        "output.bias": (VOCAB,),
    }
    program = model.build(tmp_path)
    qkv, *_, head = ops_of(program, Linear)
    assert isinstance(qkv, Linear)
    assert isinstance(head, Linear)
    assert qkv.biases == ("blk.0.attn_q.bias", None, None)
    assert head.biases == ("output.bias",)
    assert [op.group for op in ops_of(program, Norm) if isinstance(op, Norm)].count(HEAD_DIM) == 1
    assert set(program.weights()) == set(model.tensors)


@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((HEAD_DIM,), HEAD_DIM),
        ((HEADS, HEAD_DIM), HEAD_DIM),
        ((HEADS * HEAD_DIM,), HEADS * HEAD_DIM),
    ],
)
def test_a_head_norms_shape_tells_what_it_norms(
    model: TinyModel, tmp_path: Path, shape: tuple[int, ...], group: int
) -> None:
    model.tensors["blk.0.attn_q_norm.weight"] = shape
    norm = next(
        op
        for op in model.build(tmp_path).ops
        if isinstance(op, Norm) and op.weight == "blk.0.attn_q_norm.weight"
    )
    assert norm.group == group


def test_a_fused_projection_is_one_matrix(model: TinyModel, tmp_path: Path) -> None:
    model.drop_from_layers("attn_q", "attn_k", "attn_v")
    model.add_to_layers(attn_qkv=((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH))
    qkv = ops_of(model.build(tmp_path), Linear)[0]
    assert isinstance(qkv, Linear)
    assert qkv.weights == ("blk.0.attn_qkv.weight",)


def test_experts_are_used_where_there_is_a_router(model: TinyModel, tmp_path: Path) -> None:
    model.drop_from_layers("ffn_gate", "ffn_up", "ffn_down")
    model.keys |= {"expert_count": 3, "expert_used_count": 2}
    model.add_to_layers(
        ffn_gate_inp=(3, WIDTH),
        ffn_gate_exps=(3, HIDDEN, WIDTH),
        ffn_up_exps=(3, HIDDEN, WIDTH),
        ffn_down_exps=(3, WIDTH, HIDDEN),
    )
    experts = ops_of(model.build(tmp_path), Moe)
    assert len(experts) == LAYERS
    assert all(isinstance(op, Moe) and op.used == 2 and op.normalize for op in experts)
    model.keys["expert_used_count"] = 4
    with pytest.raises(GGUFError, match="expert_used_count"):
        model.build(tmp_path)


def test_an_unknown_architecture_is_refused_by_name(model: TinyModel, tmp_path: Path) -> None:
    model.architecture = "lama"
    with pytest.raises(UnsupportedArchitectureError, match="'lama'"):
        model.build(tmp_path)


@pytest.mark.parametrize("name", sorted(TinyModel().tensors))
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    model: TinyModel, tmp_path: Path, name: str
) -> None:
    shape = model.tensors.pop(name)
    if name != "output.weight":  # then it is tied
        with pytest.raises(GGUFError, match=f"tensor '{name}' is missing"):
            model.build(tmp_path)
    wrong = [(1, *shape), (*shape, 2), tuple(n + 1 for n in shape), shape[:-1]]
    wrong += [shape[::-1]] if shape != shape[::-1] else []
    for bad in wrong:
        model.tensors[name] = bad
        # A wrong embedding shows in whatever is measured against it.
        told = "output.weight" if name == "token_embd.weight" else name
        with pytest.raises(GGUFError, match=f"tensor '({name}|{told})'"):
            model.build(tmp_path)


def test_tensors_that_nothing_reads_are_refused(model: TinyModel, tmp_path: Path) -> None:
    for name in ("blk.1.attn_q.scale", "blk.0.ffn_gate_inp_shexp.weight", "blk.2.attn_q.weight"):
        model.tensors[name] = (WIDTH,)
        with pytest.raises(GGUFError, match=f"'{name}' has no place"):
            model.build(tmp_path)
        del model.tensors[name]
    model.tensors["cls.weight"] = (WIDTH,)  # outside of the layers it does no harm
    model.build(tmp_path)


BAD_KEYS: list[tuple[str, KeyValue]] = [
    *((key, value) for key in ("block_count", "embedding_length") for value in (0, -1, 3, 2**40)),
    ("block_count", 10**9),
    ("context_length", 0),
    ("attention.head_count", 0),
    ("attention.head_count", 3),
    ("attention.head_count_kv", 0),
    ("attention.head_count_kv", [1, 1]),
    ("attention.key_length", 2**31 - 2),
    ("attention.value_length", 5),
    ("attention.layer_norm_rms_epsilon", float("nan")),
    ("attention.layer_norm_rms_epsilon", 0.0),
    ("feed_forward_length", 13),
    ("rope.dimension_count", 3),
    ("rope.dimension_count", 6),
    ("rope.freq_base", 1.0),
    ("rope.freq_base", -10.0),
    ("rope.freq_base", 1e300),
    ("rope.scaling.type", "cubic"),
    ("rope.scaling.factor", -1.0),
    ("rope.scaling.factor", float("inf")),
    ("rope.scaling.original_context_length", 0),
    ("rope.scaling.yarn_beta_slow", 1e-300),
    ("rope.scaling.yarn_log_multiplier", -0.7),
]


@pytest.mark.parametrize(("key", "value"), BAD_KEYS)
def test_a_key_that_does_not_fit_is_refused(
    model: TinyModel, tmp_path: Path, key: str, value: KeyValue
) -> None:
    model.keys["rope.scaling.type"] = "yarn"
    model.keys[key] = value
    with pytest.raises(ModelError, match=r"key 'llama|tensor '"):
        model.build(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(model: TinyModel, tmp_path: Path, key: str) -> None:
    del model.keys[key]
    with pytest.raises(GGUFError, match=f"key 'llama.{key}' is missing"):
        model.build(tmp_path)


def test_rope_factors_must_divide(model: TinyModel, tmp_path: Path) -> None:
    model.tensors["rope_freqs.weight"] = (HEAD_DIM // 2,)
    model.build(tmp_path)
    for value in (0.0, float("nan"), float("inf")):
        model.values["rope_freqs.weight"] = [1.0, value]
        with pytest.raises(GGUFError, match=r"'rope_freqs\.weight' holds no valid divisors"):
            model.build(tmp_path)
