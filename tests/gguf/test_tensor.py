from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile, TensorType
from localllm.gguf.blocks import block_size, row_bytes, type_size
from tests.gguf import build


def test_types_and_blocks_are_the_formats_own() -> None:
    for theirs, sizes in GGML_QUANT_SIZES.items():
        ours = TensorType(int(theirs))
        assert ours.name == theirs.name
        assert (block_size(ours), type_size(ours)) == sizes


def test_rows_hold_whole_blocks() -> None:
    assert row_bytes(TensorType.Q4_K, 512) == 288
    with pytest.raises(ValueError, match="576 is not a multiple of Q4_K's block of 256"):
        row_bytes(TensorType.Q4_K, 576)


_T = TensorType
NOT_WEIGHTS = {_T.Q8_1, _T.Q8_K, _T.Q1_0, _T.I8, _T.I16, _T.I32, _T.I64, _T.F64}
WEIGHTS = [tensor_type for tensor_type in TensorType if tensor_type not in NOT_WEIGHTS]


@pytest.mark.parametrize("tensor_type", WEIGHTS, ids=lambda t: t.name)
def test_dequantizes_any_type_of_weight(tmp_path: Path, tensor_type: TensorType) -> None:
    cols = 2 * max(block_size(tensor_type), 16)
    rng = np.random.default_rng(int(tensor_type))
    packed = rng.integers(0, 256, (2, 3, row_bytes(tensor_type, cols)), np.uint8)
    path = tmp_path / "t.gguf"
    info = build.TensorInfo("t", (cols, 3, 2), int(tensor_type))
    path.write_bytes(build.gguf(tensors=[info], data=packed.tobytes()))
    with np.errstate(all="ignore"):
        expected = dequantize(packed, GGMLQuantizationType(int(tensor_type)))
    with GGUFFile.open(path) as file:
        values = file.tensors["t"].dequantize()
    assert values.shape == (2, 3, cols)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected.reshape(values.shape), equal_nan=True)


def test_values_survive_quantization(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType.Q8_0)
    path = tmp_path / "t.gguf"
    info = build.TensorInfo("t", (96, 5), TensorType.Q8_0)
    path.write_bytes(build.gguf(tensors=[info], data=packed.tobytes()))
    with GGUFFile.open(path) as file:
        assert file.tensors["t"].raw().shape == (5, 102)
        assert np.abs(file.tensors["t"].dequantize() - values).max() < 0.02


@pytest.mark.parametrize("tensor_type", sorted(NOT_WEIGHTS), ids=lambda t: t.name)
def test_what_holds_no_weights_is_refused(tmp_path: Path, tensor_type: TensorType) -> None:
    path = tmp_path / "t.gguf"
    info = build.TensorInfo("odd", (256,), tensor_type)
    path.write_bytes(build.gguf(tensors=[info], data=bytes(row_bytes(tensor_type, 256))))
    with (
        GGUFFile.open(path) as file,
        pytest.raises(GGUFError, match=f"tensor 'odd': cannot convert {tensor_type.name}"),
    ):
        file.tensors["odd"].dequantize()
