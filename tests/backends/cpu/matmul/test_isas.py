"""Every instruction set gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from llvmlite import binding as llvm

from localllm.backends.cpu import target
from localllm.errors import LocalLLMError
from tests.backends.cpu.matmul.digests import digests
from tests.helpers import ROOT

# The least x86-64: no SSE4, no FMA, no F16C, so that LLVM has to find a way around all of them.
_BASELINE = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.parametrize("isa", target.ISAS)
def test_the_same_bits(isa: str) -> None:
    if isa == target.current():
        pytest.skip("it is what the others are compared with")
    try:
        target.resolve(isa)
    except LocalLLMError as error:
        pytest.skip(str(error))
    environment = dict(os.environ)
    if isa == "scalar" and llvm.get_process_triple().startswith("x86_64"):
        environment |= _BASELINE
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cpu.matmul.digests", isa],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == digests()
