"""`scripts/bench_step` accounts for a step's time."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.helpers import FIXTURES, ROOT


def test_the_shares_are_parts_of_the_step() -> None:
    model = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
    script = ROOT / "scripts" / "bench_step"
    command = [sys.executable, str(script), str(model), "--batch", "3", "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, row = done.stdout.splitlines()
    name, sequences, step, sampler, python, both = (cell.strip() for cell in row.split("|")[1:-1])
    assert (name, sequences) == (model.name, "3")
    assert 0 < float(sampler) < float(step)
    assert 0 < float(python) < float(step)
    assert re.fullmatch(r"\d+\.\d %", both)
