"""Every instruction set gives the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from llvmlite import binding as llvm

from localllm.backends.cpu import target
from localllm.errors import LocalLLMError
from tests.backends.cpu.matmul.digests import digests
from tests.backends.cpu.matmul.emulated import KINDS
from tests.helpers import ROOT

# The least x86-64: no SSE4, no FMA, no F16C, so that LLVM has to find a way around all of them.
_BASELINE = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}


# AVX-VNNI's own encoding, where the processor has AVX-512 as well.
_AVXVNNI = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avxvnni"}


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
    if isa == "vnni" and "avxvnni" in target.cpu_features():
        environment |= _AVXVNNI
    assert printed_by(environment, "digests", isa) == digests()


def test_the_same_bits_where_weights_are_signed() -> None:
    """As of the isa dotprod, on any machine."""
    if target.current() == "dotprod":
        pytest.skip("this is the machine itself")
    assert printed_by(dict(os.environ), "emulated") == digests(KINDS)


def printed_by(environment: dict[str, str], module: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.backends.cpu.matmul.{module}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
