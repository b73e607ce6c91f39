from __future__ import annotations

from pathlib import Path

from localllm.gguf import GGUFFile
from localllm.models import ModelInfo
from tests.helpers import architecture_cases
from tests.models.tiny import CONTEXT, HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH, TinyModel


def test_a_models_numbers(tmp_path: Path) -> None:
    model = TinyModel()
    path = model.write(tmp_path)
    with GGUFFile.open(path) as file:
        info = ModelInfo.read(file)
        parameters = sum(tensor.rows * tensor.shape[-1] for tensor in file.tensors.values())
    assert info == ModelInfo(
        name="tiny",
        architecture="llama",
        supported=True,
        parameters=parameters,
        file_type="F32",
        formats={"F32": 4 * parameters},
        size=path.stat().st_size,
        context=CONTEXT,
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        experts=None,
        vocabulary=VOCAB,
    )


def test_what_is_unsupported_or_incomplete_can_still_be_described(tmp_path: Path) -> None:
    model = TinyModel("future")
    model.keys = {"attention.head_count": [1, 2], "block_count": "many"}
    del model.tensors["token_embd.weight"]
    with GGUFFile.open(model.write(tmp_path)) as file:
        info = ModelInfo.read(file)
    assert (info.architecture, info.supported) == ("future", False)
    assert info.heads is info.kv_heads is info.layers is info.vocabulary is None


def test_the_recipe_and_the_formats_that_it_mixed() -> None:
    (case,) = architecture_cases("llama-format-q4_k_s")
    with GGUFFile.open(case.gguf) as file:
        info = ModelInfo.read(file)
    assert info.name == "tiny random model"
    assert info.file_type == next(iter(info.formats))  # the file names no recipe
    assert {"Q4_K", "F32"} < set(info.formats)
    assert list(info.formats.values()) == sorted(info.formats.values(), reverse=True)
