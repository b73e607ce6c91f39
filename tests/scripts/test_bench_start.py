"""`scripts/bench_start`: a row for the first start, a row for those that follow."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import FIXTURES, ROOT

SCRIPT = ROOT / "scripts" / "bench_start"
MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_table() -> None:
    done = run(str(MODEL), "--starts", "2", "--", "--backend", "reference")
    assert done.returncode == 0, done.stderr
    heading, _, *rows = (line[1:-1].split("|") for line in done.stdout.splitlines())
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:2] for row in cells] == [[MODEL.name, "cold"], [MODEL.name, "warm"]]
    for row in cells:
        assert len(row) == len(heading)
        assert all(float(cell) > 0 for cell in row[2:6])
        assert float(row[5]) < 2000, "megabytes of a model of one"
        assert float(row[7]) >= MODEL.stat().st_size // 1_000_000


def test_a_server_that_does_not_start() -> None:
    done = run(str(MODEL), "--", "--backend", "reference", "--ctx-size", "0")
    assert done.returncode == 1
    assert "ended with" in done.stderr
