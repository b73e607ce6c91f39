from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, architecture_cases, tokenizer_cases

BASES = [case.gguf for case in architecture_cases("llama-format-q4_k_s", "llama-format-q2_k")]
BASES += [case.gguf for case in tokenizer_cases("llama-spm", "bert-bge")]


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux tells it")
@pytest.mark.parametrize("seed", [0, 250])
def test_damaged_files_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """None crashes, hangs, raises anything but a ModelError or takes memory beyond its size."""
    module = ["-m", "tests.gguf.load_damaged"]
    arguments = [str(tmp_path), str(seed), "250", *map(str, BASES)]
    result = subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=ROOT,
        # One thread: a fork takes no others along.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    ends = re.fullmatch(r"loaded (\d+) refused (\d+)\n", result.stdout)
    assert ends, result.stdout
    loaded, refused = int(ends[1]), int(ends[2])
    assert loaded + refused == 250
    assert loaded > 20
    assert refused > 20
