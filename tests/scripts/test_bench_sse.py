"""`scripts/bench_sse`: streams run at the rate that was asked for, and their cost is told."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.helpers import FIXTURES, ROOT

SCRIPT = ROOT / "scripts" / "bench_sse"
MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"


def test_a_few_streams() -> None:
    command = [sys.executable, str(SCRIPT), str(MODEL), "--streams", "3", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(
        r"3 streams, (\d+) tokens/s in all \(asked for: 60\): "
        r"[\d.]+% of one core, \d+ us a token\n",
        done.stdout,
    )
    assert match, done.stdout
    assert int(match[1]) > 0
