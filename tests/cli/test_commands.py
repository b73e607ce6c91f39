"""The program as a user starts it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli import app
from tests.helpers import FIXTURES

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
HEAVY = ("numpy", "numba", "torch", "fastapi", "uvicorn", "tokenizers", "huggingface_hub")
COMMANDS = ("serve", "chat", "bench", "info", "pull")


def localllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localllm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version() -> None:
    done = localllm("--version")
    assert done.returncode == 0
    assert done.stdout == f"localllm {importlib.metadata.version('localllm')}\n"


def test_help_is_quick_to_import_and_names_the_commands() -> None:
    program = (
        "import sys; from localllm.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert all(f" {command} " in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_brackets_in_explanations_are_shown() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200)
    assert "[[key]] tables" in " ".join(shown.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    group: Any = typer.main.get_command(app)
    options = group.commands[command].params
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    assert "--debug" in [name for option in options for name in option.opts]
    for option in options:
        assert option.help, f"{option.name} has no help"
        assert option.opts[-1] in shown.output or option.metavar in shown.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "70000"),
        ("serve", "--backend", "abacus"),
        ("serve", "--ctx-size", "15"),
        ("serve", "--kv-cache-memory", "much"),
        ("bench",),
        ("conjure",),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "info"])
def test_a_missing_file_is_one_line(command: str) -> None:
    done = CliRunner().invoke(app, [command, "nothing.gguf"])
    assert done.exit_code == 1
    assert done.stderr == "localllm: There is no file nothing.gguf\n"


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "info"])
def test_a_broken_file_is_one_line(command: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    options = ["--port", "0"] if command == "serve" else []
    done = localllm(command, str(path), *options)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line for line in lines if " Loading " not in line] == lines[-1:]
    assert lines[-1].startswith("localllm: broken.gguf")


def test_an_unknown_instruction_set_is_one_line() -> None:
    done = localllm("bench", str(TINY), "--isa", "abacus")
    assert done.returncode == 1
    assert done.stderr.startswith("localllm: unknown isa 'abacus': choose auto, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "chat", "bench"])
def test_an_option_that_the_backend_lacks_is_said_in_one_line(command: str) -> None:
    options = ["--port", "0"] if command == "serve" else []
    done = localllm(command, str(TINY), "--backend", "cpu", "--kv-cache-dtype", "q8_0", *options)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "localllm: the cpu backend has no KV cache in q8_0; torch has"


def test_info() -> None:
    done = CliRunner().invoke(app, ["info", str(TINY)])
    assert done.exit_code == 0, done.stderr
    about = {line[:16].strip(): line[16:].strip() for line in done.stdout.splitlines()}
    assert about["architecture"] == "llama"
    assert about["quantization"] == "Q4_1"
    assert about["context"] == "256 tokens"
    assert "128 tokens" in about["tokenizer"]
    assert "of weights" in about["memory"]
    assert "ChatML" in about["chat template"]
