"""`scripts/bench_grammar`: both rates and their difference are told."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.helpers import FIXTURES, ROOT

SCRIPT = ROOT / "scripts" / "bench_grammar"
MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"


def test_a_few_streams() -> None:
    options = ["--streams", "2", "--tokens", "4", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(MODEL), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    match = re.search(
        r"2 streams: ([\d.]+) tokens/s free, ([\d.]+) constrained: the grammar costs -?[\d.]+%\n$",
        done.stdout,
    )
    assert match, done.stdout
    assert float(match[1]) > 0
    assert float(match[2]) > 0
