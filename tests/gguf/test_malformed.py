"""Each way in which a file can be wrong, and that the message says where."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile
from tests.gguf import build
from tests.gguf.build import TensorInfo

HUGE = 2**64 - 1
F32_8 = bytes(32)


def nested(depth: int) -> bytes:
    value = build.array(build.U8, [])
    for _ in range(depth - 1):
        value = build.array(build.ARRAY, [value])
    return value


def one_key(value_type: int, value: bytes, name: str | bytes = "some.key") -> bytes:
    return build.gguf([build.key(name, value_type, value)])


def one_tensor(info: TensorInfo, data: bytes = F32_8) -> bytes:
    return build.gguf(tensors=[info], data=data)


FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "the file is empty"),
    ("not gguf", b"PK\3\4" + bytes(100), "not a GGUF file"),
    ("only the magic", b"GGUF", "header: .* past the end"),
    ("no counts", build.gguf()[:20], "header: .* past the end"),
    ("version 1", build.gguf(version=1), "GGUF version 1 is not supported"),
    ("version 4", build.gguf(version=4), "GGUF version 4 is not supported"),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ("big-endian magic", b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ("wild key count", build.gguf(n_keys=HUGE), f"{HUGE} keys"),
    ("wild tensor count", build.gguf(n_tensors=2**40), f"{2**40} tensors"),
    ("key count too high", build.gguf([build.key("a", build.U8, b"\1")], n_keys=2), "key 2 of 2"),
    ("wild key length", build.gguf(n_keys=1)[:24] + struct.pack("<Q", HUGE) + bytes(64), "key 1"),
    ("key not UTF-8", one_key(build.U8, b"\1", b"\xff\xfe"), "key 1 of 1: .* not valid UTF-8"),
    ("empty key", one_key(build.U8, b"\1", ""), "the name is empty"),
    ("duplicate key", build.gguf([build.key("a", build.U8, b"\1")] * 2), "key 'a': .* twice"),
    ("long key", one_key(99, b"", "k" * 99), f"key '{'k' * 77}...': unknown value type 99"),
    ("unknown value type", one_key(13, bytes(8)), "key 'some.key': unknown value type 13"),
    ("unknown element type", one_key(build.ARRAY, build.array(99, [])), "'some.key': unknown"),
    ("cut scalar", one_key(build.U64, b"\1" * 8)[:51], "key 'some.key': 8 bytes .* past"),
    ("wild string", one_key(build.STRING, struct.pack("<Q", HUGE)), "'some.key': .* past the end"),
    ("wild count", one_key(build.ARRAY, build.array(build.U8, [], HUGE)), "'some.key': a count of"),
    ("wild strings", one_key(build.ARRAY, build.array(build.STRING, [], 2**61)), "'some.key'"),
    (
        "wild length in strings",
        one_key(build.ARRAY, build.array(build.STRING, [struct.pack("<Q", HUGE), bytes(99)])),
        "'some.key': a string in the array runs past",
    ),
    (
        "last string too long",
        one_key(build.ARRAY, build.array(build.STRING, [struct.pack("<Q", 1000)])),
        "'some.key': .* past the end",
    ),
    ("wild nested", one_key(build.ARRAY, build.array(build.ARRAY, [], HUGE)), "'some.key'"),
    ("deep nesting", one_key(build.ARRAY, nested(9)), "'some.key': arrays are nested"),
    ("very deep nesting", one_key(build.ARRAY, nested(5000)), "'some.key': arrays are nested"),
    ("alignment 0", one_key(build.U32, bytes(4), "general.alignment"), "alignment': .* power of"),
    ("alignment 33", one_key(build.U32, b"\x21\0\0\0", "general.alignment"), "power of two"),
    ("alignment text", one_key(build.STRING, build.text("32"), "general.alignment"), "power of"),
    ("tensor not UTF-8", one_tensor(TensorInfo(b"\xff")), "tensor 1 of 1: .* not valid UTF-8"),
    ("no dimensions", one_tensor(TensorInfo(dims=())), "tensor 't': it has 0 dimensions"),
    ("five dimensions", one_tensor(TensorInfo(dims=(1,) * 5)), "tensor 't': it has 5 dimensions"),
    ("zero dimension", one_tensor(TensorInfo(dims=(8, 0))), "tensor 't': a dimension is zero"),
    ("unknown type", one_tensor(TensorInfo(type=4)), "tensor 't': unknown tensor type 4"),
    ("half a block", one_tensor(TensorInfo(dims=(40,), type=8)), "'t': rows of 40 .* Q8_0.* 32"),
    ("overflowing shape", one_tensor(TensorInfo(dims=(2**40,) * 4)), "'t': its data runs past"),
    ("wild offset", one_tensor(TensorInfo(offset=HUGE - 31)), "'t': its data runs past"),
    ("misaligned", one_tensor(TensorInfo(offset=8), bytes(64)), "'t': its offset 8 is not a mult"),
    ("data cut", one_tensor(TensorInfo(), bytes(31)), "tensor 't': its data runs past"),
    ("no data", one_tensor(TensorInfo(), b""), "tensor 't': its data runs past"),
    ("duplicate tensor", build.gguf(tensors=[TensorInfo()] * 2, data=F32_8), "'t': .* twice"),
    (
        "overlap",
        build.gguf(tensors=[TensorInfo("a", (9,)), TensorInfo("b", offset=32)], data=bytes(64)),
        "tensor 'b': its data overlaps that of 'a'",
    ),
    (
        "overlap out of order",
        build.gguf(tensors=[TensorInfo("a", offset=32), TensorInfo("b", (16,))], data=bytes(64)),
        "tensor 'a': its data overlaps that of 'b'",
    ),
]


@pytest.mark.parametrize(("content", "message"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_refused_with_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile.open(path)
    assert "bad.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value_type", "value", "message"),
    [
        (build.STRING, build.text(b"\xff"), "key 'k': .* not valid UTF-8"),
        (build.BOOL, b"\2", "key 'k': a bool is neither 0 nor 1"),
        (build.ARRAY, build.array(build.BOOL, [b"\1", b"\7"]), "key 'k': a bool"),
        (build.ARRAY, build.array(build.ARRAY, [build.array(build.BOOL, [b"\7"])]), "key 'k'"),
    ],
)
def test_bad_content_is_refused_when_read(
    tmp_path: Path, value_type: int, value: bytes, message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(one_key(value_type, value, "k"))
    with GGUFFile.open(path) as file, pytest.raises(GGUFError, match=message):
        _ = file.metadata["k"]


def test_arrays_may_nest_a_little(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(one_key(build.ARRAY, nested(8)))
    with GGUFFile.open(path) as file:
        value = file.metadata["some.key"]
        assert isinstance(value, list)
        assert len(value) == 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    for path, message in (
        (tmp_path / "absent.gguf", "absent.gguf: No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
    ):
        with pytest.raises(GGUFError, match=message):
            GGUFFile.open(path)
