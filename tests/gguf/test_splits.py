from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile
from tests.gguf import build
from tests.gguf.build import TensorInfo


def shard(
    number: int,
    count: int = 3,
    *,
    tensors: tuple[str, ...] | None = None,
    total: int = 3,
    claims: int | None = None,
) -> bytes:
    keys = [
        build.key("split.no", build.U16, build.number(build.U16, number)),
        build.key(
            "split.count", build.U16, build.number(build.U16, count if claims is None else claims)
        ),
        build.key("split.tensors.count", build.I32, build.number(build.I32, total)),
    ]
    if number == 0:
        keys.append(build.key("general.architecture", build.STRING, build.text("llama")))
    names = (f"t{number}",) if tensors is None else tensors
    infos = [TensorInfo(name, (8,), offset=32 * index) for index, name in enumerate(names)]
    data = b"".join(np.full(8, number, np.float32).tobytes() for _ in names)
    return build.gguf(keys, infos, data)


def shard_path(folder: Path, number: int, count: int = 3) -> Path:
    return folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for number in range(3):
        shard_path(tmp_path, number).write_bytes(shard(number))
    return tmp_path


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_shard_opens_the_set(model: Path, opened: int) -> None:
    path = shard_path(model, opened)
    with GGUFFile.open(path) as file:
        assert file.path == path
        assert file.shards == [shard_path(model, number) for number in range(3)]
        assert file.architecture == "llama"
        assert list(file.tensors) == ["t0", "t1", "t2"]
        for number in range(3):
            assert np.all(file.tensors[f"t{number}"].dequantize() == number)


def test_shards_are_found_beside_a_link(model: Path, tmp_path: Path) -> None:
    """As in a download cache, where the names are links to blobs elsewhere."""
    links = tmp_path / "links"
    links.mkdir()
    for number in range(3):
        blob = shard_path(model, number).rename(model / f"blob{number}")
        shard_path(links, number).symlink_to(blob)
    with GGUFFile.open(shard_path(links, 1)) as file:
        assert len(file.tensors) == 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(model: Path, missing: int) -> None:
    shard_path(model, missing).unlink()
    with pytest.raises(GGUFError, match=f"shard {shard_path(model, missing).name} is missing"):
        GGUFFile.open(shard_path(model, (missing + 1) % 3))


def test_a_renamed_shard_is_explained(model: Path) -> None:
    path = shard_path(model, 0).rename(model / "renamed.gguf")
    with pytest.raises(GGUFError, match=r"renamed.gguf: key 'split.count' says 3 shards"):
        GGUFFile.open(path)


def test_a_broken_shard_is_named(model: Path) -> None:
    shard_path(model, 1).write_bytes(shard(1)[:-1])
    with pytest.raises(GGUFError, match=r"00002-of-00003.gguf: tensor 't1': its data runs past"):
        GGUFFile.open(shard_path(model, 0))


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (shard(2), r"00002-of-00003.gguf: key 'split.no' is 2 where 1"),
        (shard(1, claims=4), r"00002-of-00003.gguf: key 'split.count' is 4 where 3"),
        (build.gguf(), "00002-of-00003.gguf: key 'split.no' is missing"),
        (shard(1, tensors=("t0",)), r"00002-of-00003.gguf: tensor 't0': another shard has it"),
        (shard(1, tensors=()), "'split.tensors.count' says 3 tensors, the shards have 2"),
    ],
)
def test_shards_have_to_agree(model: Path, replacement: bytes, message: str) -> None:
    shard_path(model, 1).write_bytes(replacement)
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(shard_path(model, 0))


@pytest.mark.parametrize("claims", [0, 1])
def test_a_set_of_one_needs_no_name(tmp_path: Path, claims: int) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(shard(0, claims=claims, total=1))
    with GGUFFile.open(path) as file:
        assert file.shards == [path]


@pytest.mark.parametrize(
    ("value_type", "value"),
    [(build.STRING, build.text("3")), (build.ARRAY, build.array(build.U16, []))],
)
def test_a_count_of_the_wrong_type_is_refused(
    tmp_path: Path, value_type: int, value: bytes
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build.gguf([build.key("split.count", value_type, value)]))
    with pytest.raises(GGUFError, match=r"key 'split.count' is not an integer"):
        GGUFFile.open(path)


def test_a_fingerprint_is_of_the_set_and_changes_with_any_header(model: Path) -> None:
    def fingerprint(number: int = 0) -> str:
        with GGUFFile.open(shard_path(model, number)) as file:
            return file.fingerprint()

    before = fingerprint()
    assert fingerprint(1) == before
    content = shard(2)
    shard_path(model, 2).write_bytes(content.replace(b"t2", b"t9"))
    renamed = fingerprint()
    shard_path(model, 2).write_bytes(content + b"longer")
    assert len({before, renamed, fingerprint()}) == 3
    shard_path(model, 2).write_bytes(content)
    assert fingerprint() == before
