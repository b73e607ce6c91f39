"""What families do that the conformance files do not reach: defaults, long periods, thresholds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.program import (
    Attention,
    PositionScale,
    Program,
    Rope,
    Scale,
    Softcap,
)
from localllm.errors import GGUFError
from tests.models.tiny import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    WIDTH,
    TinyModel,
    base_tensors,
    ops_of,
)


def deep(architecture: str, layers: int) -> TinyModel:
    model = TinyModel(architecture, tensors=base_tensors(layers))
    model.keys["block_count"] = layers
    return model


def windows(program: Program) -> list[int | None]:
    return [op.window for op in program.ops if isinstance(op, Attention)]


def rotated_layers(program: Program) -> list[bool]:
    """Whether each layer's q and k rotate."""
    rotated, ropes = [], 0
    for op in program.ops:
        ropes += isinstance(op, Rope)
        if isinstance(op, Attention):
            assert ropes in (0, 2)
            rotated.append(ropes == 2)
            ropes = 0
    return rotated


def add_post_norms(model: TinyModel) -> None:
    model.add_to_layers(post_attention_norm=(WIDTH,), post_ffw_norm=(WIDTH,))


def add_head_norms(model: TinyModel, q: int = HEAD_DIM, k: int = HEAD_DIM) -> None:
    model.add_to_layers(attn_q_norm=(q,), attn_k_norm=(k,))


def gemma3(layers: int = 7) -> TinyModel:
    model = deep("gemma3", layers)
    add_post_norms(model)
    add_head_norms(model)
    return model


def test_gemma3_windows_five_of_six_layers_with_a_rotation_of_their_own(tmp_path: Path) -> None:
    model = gemma3()
    model.keys |= {"attention.sliding_window": 32, "rope.scaling.factor": 8.0}
    program = model.build(tmp_path)
    assert windows(program) == [32, 32, 32, 32, 32, None, 32]
    assert [(group.window, len(group.layers)) for group in program.kv_groups] == [
        (32, 6),
        (None, 1),
    ]
    tables = [op.table for op in program.ops if isinstance(op, Rope)]
    assert len({id(table) for table in tables}) == 2
    assert tables[0].inv_freq[1] == pytest.approx(10000.0**-0.5)
    assert tables[10].inv_freq[1] == pytest.approx(1000.0**-0.5 / 8)


def test_gemma3_without_a_window_is_full(tmp_path: Path) -> None:
    assert windows(gemma3(2).build(tmp_path)) == [None, None]


def test_gemma3_caps_logits_only_when_told(tmp_path: Path) -> None:
    model = gemma3(1)
    assert not ops_of(model.build(tmp_path), Softcap)
    model.keys["final_logit_softcapping"] = 20.0
    (cap,) = ops_of(model.build(tmp_path), Softcap)
    assert isinstance(cap, Softcap)
    assert cap.cap == 20.0


@pytest.mark.parametrize(("layers", "size"), [(61, HEAD_DIM), (62, WIDTH)])
def test_the_largest_gemma3_scales_by_the_width_per_head(
    tmp_path: Path, layers: int, size: int
) -> None:
    model = gemma3(layers)
    model.keys["attention.head_count"] = 1
    model.add_to_layers(attn_q=(HEAD_DIM, WIDTH), attn_output=(WIDTH, HEAD_DIM))
    scales = {op.scale for op in model.build(tmp_path).ops if isinstance(op, Attention)}
    assert scales == {size**-0.5}


def test_gemma2_alternates_and_caps_by_default(tmp_path: Path) -> None:
    model = deep("gemma2", 4)
    add_post_norms(model)
    program = model.build(tmp_path)
    assert windows(program) == [4096, None, 4096, None]
    assert {op.softcap for op in program.ops if isinstance(op, Attention)} == {50.0}
    (cap,) = ops_of(program, Softcap)
    assert isinstance(cap, Softcap)
    assert cap.cap == 30.0


def test_a_pattern_is_an_array_or_a_period(tmp_path: Path) -> None:
    model = gemma3(4)
    model.keys |= {"attention.sliding_window": 16, "attention.sliding_window_pattern": 2}
    assert windows(model.build(tmp_path)) == [16, None, 16, None]
    model.keys["attention.sliding_window_pattern"] = [0, 1, 1, 0]
    assert windows(model.build(tmp_path)) == [None, 16, 16, None]
    model.keys["attention.sliding_window_pattern"] = [0, 1, 1]
    with pytest.raises(GGUFError, match="sliding_window_pattern' has 3 entries for 4 layers"):
        model.build(tmp_path)


def test_window_layers_of_another_size_are_refused(tmp_path: Path) -> None:
    model = gemma3(2)
    model.keys |= {"attention.sliding_window": 16, "attention.key_length_swa": 2 * HEAD_DIM}
    with pytest.raises(GGUFError, match="key_length_swa' differs"):
        model.build(tmp_path)


def test_every_fourth_layer_of_smollm3_has_no_positions(tmp_path: Path) -> None:
    program = deep("smollm3", 9).build(tmp_path)
    assert rotated_layers(program) == [True, True, True, False] * 2 + [True]


def test_full_layers_of_cohere2_have_no_positions(tmp_path: Path) -> None:
    model = deep("cohere2", 5)
    model.drop_from_layers("ffn_norm")
    model.keys["attention.sliding_window"] = 16
    program = model.build(tmp_path)
    assert windows(program) == [16, 16, 16, None, 16]
    assert rotated_layers(program) == [True, True, True, False, True]


@pytest.mark.parametrize(("layers", "sliding"), [(30, 0), (64, 48)])
def test_only_the_large_exaone4_has_windows(tmp_path: Path, layers: int, sliding: int) -> None:
    model = deep("exaone4", layers)
    model.drop_from_layers("attn_norm", "ffn_norm")
    add_post_norms(model)
    add_head_norms(model)
    model.keys["attention.sliding_window"] = 32
    program = model.build(tmp_path)
    assert windows(program).count(32) == sliding
    rotated = rotated_layers(program)
    assert rotated == ([True, True, True, False] * 16 if sliding else [True] * layers)


def test_olmo3_stretches_only_full_layers(tmp_path: Path) -> None:
    model = deep("olmo2", 4)
    model.drop_from_layers("attn_norm", "ffn_norm")
    add_post_norms(model)
    add_head_norms(model, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    model.keys |= {
        "attention.sliding_window": 32,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 16,
    }
    tables = [op.table for op in model.build(tmp_path).ops if isinstance(op, Rope)]
    assert [table.scale for table in tables[::2]] == [1.0] * 3 + [
        pytest.approx(1 + 0.1 * math.log(8))
    ]


def test_phi3_takes_long_factors_beyond_the_original_context(tmp_path: Path) -> None:
    model = deep("phi3", 1)
    model.drop_from_layers("ffn_gate")
    model.add_to_layers(ffn_up=(2 * HIDDEN, WIDTH))
    model.keys |= {
        "rope.scaling.original_context_length": CONTEXT,
        "rope.scaling.attn_factor": 1.19,
    }
    for name, factor in (("short", 1.0), ("long", 4.0)):
        model.tensors[f"rope_factors_{name}.weight"] = (HEAD_DIM // 2,)
        model.values[f"rope_factors_{name}.weight"] = [factor] * (HEAD_DIM // 2)

    def rotation(max_context: int) -> npt.NDArray[np.float64]:
        ropes = [op for op in model.build(tmp_path, max_context).ops if isinstance(op, Rope)]
        assert {op.table.scale for op in ropes} == {1.19}
        return ropes[0].table.inv_freq

    np.testing.assert_allclose(rotation(CONTEXT), [1.0, 1000.0**-0.5])
    np.testing.assert_allclose(rotation(CONTEXT + 1), [0.25, 1000.0**-0.5 / 4])
    del model.tensors["rope_factors_long.weight"]
    with pytest.raises(GGUFError, match=r"'rope_factors_long\.weight' is missing"):
        model.build(tmp_path, CONTEXT + 1)


def test_mistral3_queries_grow_with_their_position(tmp_path: Path) -> None:
    model = deep("mistral3", 1)
    assert not ops_of(model.build(tmp_path), PositionScale)
    model.keys |= {
        "attention.temperature_scale": 0.1,
        "rope.scaling.original_context_length": 16,
    }
    (scale,) = ops_of(model.build(tmp_path), PositionScale)
    assert isinstance(scale, PositionScale)
    assert (scale.beta, scale.floor_scale, scale.offset) == (0.1, 16, 0)


def test_granites_scales(tmp_path: Path) -> None:
    model = deep("granite", 1)
    model.keys |= {
        "embedding_scale": 12.0,
        "residual_scale": 0.25,
        "logit_scale": 8.0,
        "attention.scale": 0.125,
    }
    program = model.build(tmp_path)
    factors = [op.factor for op in program.ops if isinstance(op, Scale)]
    assert factors == [12.0, 0.25, 0.25, 1 / 8]
    assert [op.scale for op in program.ops if isinstance(op, Attention)] == [0.125]
    model.keys["rope.scaling.finetuned"] = False
    assert rotated_layers(model.build(tmp_path)) == [False]


def test_old_minicpm_files_leave_their_scales_out(tmp_path: Path) -> None:
    program = deep("minicpm", 4).build(tmp_path)
    factors = [op.factor for op in program.ops if isinstance(op, Scale)]
    assert factors[0] == 12.0
    assert set(factors[1:-1]) == {0.7}
    assert factors[-1] == 256 / WIDTH


def glm4(layers: int) -> TinyModel:
    model = deep("glm4", layers)
    model.drop_from_layers("ffn_gate")
    model.add_to_layers(ffn_up=(2 * HIDDEN, WIDTH))
    add_post_norms(model)
    return model


@pytest.mark.parametrize(
    ("sections", "interleaved"), [(None, True), ([0, 0, 0, 0], True), ([1, 1, 0, 0], False)]
)
def test_glm4_rotates_halves_only_with_sections(
    tmp_path: Path, sections: list[int] | None, interleaved: bool
) -> None:
    model = glm4(1)
    if sections:
        model.keys["rope.dimension_sections"] = sections
    ropes = ops_of(model.build(tmp_path), Rope)
    assert {op.table.interleaved for op in ropes if isinstance(op, Rope)} == {interleaved}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = glm4(3)
    model.keys["nextn_predict_layers"] = 1
    model.tensors["blk.2.nextn.eh_proj.weight"] = (WIDTH, 2 * WIDTH)
    program = model.build(tmp_path)
    assert len(ops_of(program, Attention)) == 2
    assert not any(name.startswith("blk.2.") for name in program.weights())
    model.keys["nextn_predict_layers"] = 3
    with pytest.raises(GGUFError, match="nextn_predict_layers"):
        model.build(tmp_path)
