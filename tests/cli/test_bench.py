"""`localllm bench` with a real engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from localllm.cli import app
from tests.helpers import FIXTURES

MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"


def bench(*options: str) -> str:
    command = [sys.executable, "-m", "localllm", "bench", str(MODEL), "--backend", "reference"]
    command += ["--prompt-tokens", "40", "--gen-tokens", "4", "--reps", "3", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_json() -> None:
    result = json.loads(bench("--json", "--batch", "2", "--depth", "20"))
    assert result["model"] == MODEL.name
    assert result["backend"] == "reference"
    assert result["threads"] >= 1
    assert (result["batch"], result["depth"]) == (2, 20)
    for what in ("prefill", "decode"):
        samples = result[f"{what}_samples_tok_s"]
        assert len(samples) == 3
        assert all(sample > 0 for sample in samples)
        assert result[f"{what}_tok_s"] == statistics.median(samples)


def test_text() -> None:
    lines = bench().splitlines()
    assert lines[0].startswith(MODEL.name)
    assert "40 tokens" in lines[1]
    assert "4 tokens at depth 0" in lines[2]
    assert all("tokens/s" in line for line in lines[1:])


def test_breakdown() -> None:
    """Of the CPU backend, with the floor that the machine's own speed sets."""
    command = [sys.executable, "-m", "localllm", "bench", str(MODEL), "--breakdown"]
    command += ["--prompt-tokens", "24", "--depth", "40", "--batch", "2", "--threads", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    prefill, decode = done.stdout.split("\nDecode at depth 40, 2 sequences together: ")
    assert "Prefill of 24 tokens: " in prefill
    for text in (prefill, decode):
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        cells = {row[0]: row[1:] for row in rows[2:]}
        assert {"matmul Q4_1", "attention", "quantize", "norm, quantize", "sampling", "all"} <= set(
            cells
        )
        calls = [int(row[0]) for kind, row in cells.items() if kind != "all"]
        assert sum(calls) == int(cells["all"][0])
        assert cells["matmul Q4_1"][4].endswith(("(reads)", "(products)"))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--backend", "reference"], "the CPU's own kernels alone"),
        (["--backend", "torch", "--device", "cpu"], "the CPU's own kernels alone"),
        (["--tensor-parallel-size", "2"], "one rank alone"),
    ],
)
def test_a_breakdown_of_something_else_is_refused(options: list[str], what: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(MODEL), "--breakdown", *options])
    assert done.exit_code == 1
    assert what in done.stderr
