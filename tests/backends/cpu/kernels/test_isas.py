"""Every instruction set gives the same bits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from localllm.backends.cpu import target
from tests.backends.cpu.kernels.digests import digests
from tests.helpers import ROOT


def test_the_scalar_path_gives_the_same_bits() -> None:
    if target.current() == "scalar":
        pytest.skip("this CPU has no other path to compare with")
    command = [sys.executable, "-m", "tests.backends.cpu.kernels.digests", "scalar"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == digests()
