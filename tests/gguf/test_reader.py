from __future__ import annotations

import gc
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile, TensorType
from tests.gguf import build
from tests.helpers import ArchitectureCase, TokenizerCase, architecture_cases, tokenizer_cases


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


SCALAR_VALUES: list[tuple[int, float]] = [
    (build.U8, 255),
    (build.I8, -128),
    (build.U16, 65535),
    (build.I16, -32768),
    (build.U32, 2**32 - 1),
    (build.I32, -(2**31)),
    (build.F32, 0.5),
    (build.BOOL, True),
    (build.BOOL, False),
    (build.U64, 2**64 - 1),
    (build.I64, -(2**63)),
    (build.F64, math.pi),
]


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type(tmp_path: Path, version: int) -> None:
    keys = [
        build.key(f"k{index}", value_type, build.number(value_type, value))
        for index, (value_type, value) in enumerate(SCALAR_VALUES)
    ]
    with GGUFFile.open(write(tmp_path, build.gguf(keys, version=version))) as file:
        assert file.version == version
        values = [file.metadata[f"k{index}"] for index in range(len(SCALAR_VALUES))]
    assert values == [value for _, value in SCALAR_VALUES]
    assert [type(value) for value in values] == [type(value) for _, value in SCALAR_VALUES]


@pytest.mark.parametrize(("value_type", "value"), SCALAR_VALUES)
def test_numeric_arrays_keep_their_type(tmp_path: Path, value_type: int, value: float) -> None:
    encoded = build.array(value_type, [build.number(value_type, value)] * 3)
    path = write(tmp_path, build.gguf([build.key("a", build.ARRAY, encoded)]))
    with GGUFFile.open(path) as file:
        found = file.get_array("a")
    expected = {build.BOOL: np.dtype(np.bool_)}.get(value_type, np.dtype(build.SCALARS[value_type]))
    assert found.dtype == expected
    assert found.tolist() == [value] * 3
    assert not found.flags.writeable


def test_strings_and_nested_arrays(tmp_path: Path) -> None:
    strings = build.array(build.STRING, [build.text(s) for s in ("", "a", "héllo", "日本語")])
    inner = [build.array(build.I32, [build.number(build.I32, n)] * n) for n in range(3)]
    keys = [
        build.key("s", build.STRING, build.text("größe")),
        build.key("strings", build.ARRAY, strings),
        build.key("nested", build.ARRAY, build.array(build.ARRAY, [*inner, strings])),
        build.key("empty", build.ARRAY, build.array(build.STRING, [])),
        build.key("last", build.U8, build.number(build.U8, 1)),
    ]
    with GGUFFile.open(write(tmp_path, build.gguf(keys))) as file:
        assert list(file.metadata) == ["s", "strings", "nested", "empty", "last"]
        assert file.get_str("s") == "größe"
        assert file.get_strings("strings") == ["", "a", "héllo", "日本語"]
        nested = file.metadata["nested"]
        assert isinstance(nested, list)
        assert [len(element) for element in nested] == [0, 1, 2, 4]
        assert nested[2].tolist() == [2, 2]
        assert nested[3] == file.get_strings("strings")
        assert file.get_strings("empty") == []
        assert file.get_int("last") == 1


def test_typed_access_names_the_key(tmp_path: Path) -> None:
    keys = [
        build.key("int", build.U32, build.number(build.U32, 7)),
        build.key("float", build.F32, build.number(build.F32, 1.5)),
        build.key("bool", build.BOOL, build.number(build.BOOL, True)),
        build.key("str", build.STRING, build.text("x")),
        build.key("ints", build.ARRAY, build.array(build.U8, [b"\1", b"\2"])),
    ]
    with GGUFFile.open(write(tmp_path, build.gguf(keys))) as file:
        assert (file.get_int("int"), file.get_float("float"), file.get_float("int")) == (7, 1.5, 7)
        assert isinstance(file.get_float("int"), float)
        assert file.get_bool("bool") is True
        assert file.get_int("absent", 3) == 3
        assert file.get_str("absent", None) is None
        for get, key in (
            (file.get_int, "float"),
            (file.get_int, "bool"),
            (file.get_int, "ints"),
            (file.get_float, "str"),
            (file.get_float, "bool"),
            (file.get_bool, "int"),
            (file.get_str, "int"),
            (file.get_array, "str"),
            (file.get_strings, "ints"),
        ):
            with pytest.raises(GGUFError, match=f"model.gguf: key '{key}' is not"):
                get(key)
            with pytest.raises(GGUFError, match=f"key '{key}' is not"):
                get(key, None)
        with pytest.raises(GGUFError, match=r"key 'general.architecture' is missing"):
            _ = file.architecture


def test_values_are_decoded_only_when_asked_for(tmp_path: Path) -> None:
    broken = build.array(build.STRING, [build.text("ok"), build.text(b"\xff")])
    keys = [build.key("broken", build.ARRAY, broken), build.key("n", build.U8, b"\5")]
    with GGUFFile.open(write(tmp_path, build.gguf(keys))) as file:
        assert "broken" in file.metadata
        assert file.get_int("n") == 5
        with pytest.raises(GGUFError, match="key 'broken': element 1 is not valid UTF-8"):
            file.get_strings("broken")


def test_opening_needs_no_other_library(fixtures: Path) -> None:
    """gguf-py is slow to import and only converts weights."""
    code = (
        "import sys; from localllm.gguf import GGUFFile;"
        "f = GGUFFile.open(sys.argv[1]); [f.metadata[k] for k in f.metadata];"
        "[t.raw() for t in f.tensors.values()];"
        "sys.exit('gguf' in sys.modules or 'numba' in sys.modules)"
    )
    path = fixtures / "architectures" / "llama-format-q4_0.gguf"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=120)


def test_arrays_outlive_the_file(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    content = build.gguf(tensors=[build.TensorInfo("t", (8, 3))], data=values.tobytes())
    file = GGUFFile.open(write(tmp_path, content))
    tensor = file.tensors["t"]
    raw, dequantized = tensor.raw(), tensor.dequantize()
    file.close()
    file.close()
    del file, tensor
    gc.collect()
    (tmp_path / "model.gguf").unlink()
    assert np.array_equal(raw.view(np.float32), values)
    assert np.array_equal(dequantized, values)


def test_a_closed_file_refuses(tmp_path: Path) -> None:
    content = build.gguf([build.key("n", build.U8, b"\5")], [build.TensorInfo()], bytes(32))
    file = GGUFFile.open(write(tmp_path, content))
    tensor = file.tensors["t"]
    file.close()
    with pytest.raises(ValueError, match="closed"):
        _ = file.metadata["n"]
    with pytest.raises(ValueError, match="closed"):
        tensor.raw()
    with pytest.raises(ValueError, match="closed"):
        tensor.drop_pages()


def test_dropped_pages_come_back(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * 4096 * 4, np.uint8)
    info = build.TensorInfo("t", (4096, 3), 0)
    with GGUFFile.open(write(tmp_path, build.gguf(tensors=[info], data=data.tobytes()))) as file:
        raw = file.tensors["t"].raw()
        assert np.array_equal(raw.ravel(), data)
        file.tensors["t"].drop_pages()
        assert np.array_equal(raw.ravel(), data)


def test_tensor_data_honours_the_files_alignment(tmp_path: Path) -> None:
    keys = [build.key("general.alignment", build.U32, build.number(build.U32, 256))]
    infos = [build.TensorInfo("a", (8,)), build.TensorInfo("b", (4, 2), offset=256)]
    a, b = np.arange(8, dtype=np.float32), np.arange(8, 16, dtype=np.float32)
    data = a.tobytes().ljust(256, b"\0") + b.tobytes()
    path = write(tmp_path, build.gguf(keys, infos, data, alignment=256))
    with GGUFFile.open(path) as file:
        assert np.array_equal(file.tensors["a"].dequantize(), a)
        assert np.array_equal(file.tensors["b"].dequantize(), b.reshape(2, 4))
        assert file.tensors["a"].raw().shape == (1, 32)


def test_a_vocabulary_alone_has_no_tensors(tmp_path: Path) -> None:
    content = build.gguf([build.key("general.architecture", build.STRING, build.text("llama"))])
    with GGUFFile.open(write(tmp_path, content)) as file:
        assert file.architecture == "llama"
        assert not file.tensors


def test_reads_what_the_format_s_own_writer_writes(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("u", 7)
    writer.add_float64("d", 0.1)
    writer.add_array("names", ["a", "b"])
    writer.add_array("matrix", [[1, 2], [3]])
    values = np.random.default_rng(0).standard_normal((4, 3, 32)).astype(np.float32)
    writer.add_tensor("experts", values)
    writer.add_tensor("half", values[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert (file.architecture, file.get_int("u"), file.get_float("d")) == ("llama", 7, 0.1)
        assert file.get_strings("names") == ["a", "b"]
        assert [list(row) for row in file.metadata["matrix"]] == [[1, 2], [3]]  # type: ignore[union-attr]
        assert np.array_equal(file.tensors["experts"].dequantize(), values)
        assert file.tensors["half"].type == TensorType.F16
        assert file.tensors["experts"].rows == 12


def agrees_with_gguf_py(path: Path) -> None:
    with GGUFFile.open(path) as file:
        shards = [GGUFReader(shard) for shard in file.shards]  # gguf-py knows single files
        fields = {k: v for k, v in shards[0].fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            assert_same_value(file.metadata[key], field.contents(), field.types)
        tensors = [tensor for shard in shards for tensor in shard.tensors]
        assert list(file.tensors) == [tensor.name for tensor in tensors]
        for tensor in tensors:
            ours = file.tensors[tensor.name]
            assert ours.type == int(tensor.tensor_type)
            assert ours.shape == tuple(int(dim) for dim in reversed(tensor.shape))
            assert ours.n_bytes == tensor.n_bytes
            assert np.array_equal(ours.raw().ravel(), tensor.data.view(np.uint8).ravel())


def assert_same_value(ours: Any, theirs: Any, types: list[GGUFValueType]) -> None:
    if types[0] == GGUFValueType.ARRAY:
        assert list(ours) == theirs
    else:
        assert ours == theirs


@pytest.mark.parametrize("case", architecture_cases("llama-*", "gpt-oss*"), ids=lambda c: c.name)
def test_models_read_as_gguf_py_reads_them(case: ArchitectureCase) -> None:
    agrees_with_gguf_py(case.gguf)


@pytest.mark.parametrize("case", tokenizer_cases("bert-bge", "phi-3"), ids=lambda c: c.name)
def test_vocabularies_read_as_gguf_py_reads_them(case: TokenizerCase) -> None:
    agrees_with_gguf_py(case.gguf)
