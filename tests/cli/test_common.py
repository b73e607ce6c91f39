"""Sizes, names of models, and errors in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from localllm import hub
from localllm.cli.common import errors_in_one_line, find_model, size_option
from localllm.errors import GGUFError, LocalLLMError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("48MB", 48_000_000),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5G", 3 * 2**29),
        ("64 KiB", 65_536),
        ("1000000", 1_000_000),
        ("3B", 3),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert size_option(text) == n_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 PB", "2 GiB each", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="48MB"):
        size_option(text)


def test_a_file_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.gguf"
    path.parent.mkdir()
    path.touch()
    assert find_model(str(path)) == path


def test_no_model_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ensure_default_model", lambda: Path("default"))
    assert find_model(None) == Path("default")


@pytest.mark.parametrize("name", ["owner/repo", "owner/repo:Q4_K_M", "owner/repo:file.gguf"])
def test_names_of_the_hub_are_pulled(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(hub, "pull", lambda spec: Path("pulled") / spec)
    assert find_model(name) == Path("pulled") / name


@pytest.mark.parametrize("name", ["model.gguf", "models/model.gguf", "./owner/repo", "/a/b"])
def test_files_that_are_not_there_are_not_sought_elsewhere(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(hub, "pull", lambda _: pytest.fail("asked the hub"))
    with pytest.raises(LocalLLMError, match="no file"):
        find_model(name)


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match="folder"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GGUFError("x.gguf: key 'y'\nis missing"), "localllm: x.gguf: key 'y' is missing\n"),
        (PermissionError(13, "Permission denied", "f"), "denied: 'f'\n"),
        (ZeroDivisionError("oh"), "localllm: internal error: ZeroDivisionError: oh"),
    ],
)
def test_errors_are_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, errors_in_one_line(debug=False):
        raise error
    assert ended.value.exit_code == 1
    shown = capsys.readouterr().err
    assert line in shown
    assert shown.count("\n") == 1


def test_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), errors_in_one_line(debug=True):
        raise GGUFError("bad")
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("localllm: bad\n")


def test_an_interrupt_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors_in_one_line(debug=False):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == ""


def test_what_is_no_regular_file_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(LocalLLMError, match="is a named pipe; a model is a regular file"):
        find_model(str(pipe))
    with pytest.raises(LocalLLMError, match="/dev/null is a device"):
        find_model("/dev/null")
