"""What a file is said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from localllm.gguf import GGUFFile
from localllm.server.served_model import quantization

EMBEDDING = ("token_embd.weight", GGMLQuantizationType.Q8_0, 34 * 100)
LAYERS = (
    ("blk.0.attn_q.weight", GGMLQuantizationType.Q4_K, 144 * 3),
    ("blk.0.ffn_up.weight", GGMLQuantizationType.Q6_K, 210),
)


def name_of(path: Path, *tensors: tuple[str, GGMLQuantizationType, int], kind: object) -> str:
    writer = GGUFWriter(path, "llama")
    if kind is not None:
        value_type = GGUFValueType.UINT32 if isinstance(kind, int) else GGUFValueType.STRING
        writer.add_key_value("general.file_type", kind, value_type)
    for name, format, n_bytes in tensors:
        writer.add_tensor(name, np.zeros((1, n_bytes), np.uint8), raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        return quantization(file)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (LlamaFileType.MOSTLY_Q4_K_M, "Q4_K_M"),
        (LlamaFileType.MOSTLY_Q4_1 | LlamaFileType.GUESSED, "Q4_1"),
        (LlamaFileType.ALL_F32, "F32"),
    ],
)
def test_a_file_is_called_what_it_was_made_as(tmp_path: Path, kind: int, name: str) -> None:
    assert name_of(tmp_path / "m.gguf", EMBEDDING, *LAYERS, kind=int(kind)) == name


@pytest.mark.parametrize("kind", [None, 999, "Q4_K_M"])
def test_else_it_has_the_name_of_most_of_its_layers(tmp_path: Path, kind: object) -> None:
    assert name_of(tmp_path / "m.gguf", EMBEDDING, *LAYERS, kind=kind) == "Q4_K"
    assert name_of(tmp_path / "n.gguf", EMBEDDING, kind=kind) == "Q8_0"
