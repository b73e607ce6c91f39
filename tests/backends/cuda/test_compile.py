"""The kernels are not only Python: Triton compiles them for a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.backends.cuda.kernels.matmul import SMALL_SHARED_MEMORY
from tests.helpers import ROOT

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("compile_kernels.py")
HOPPER = "90"


def test_all_kernels_compile_and_multiply_on_tensor_cores(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), HOPPER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    names = {kernel["name"] for kernel in kernels}
    assert {"_matmul_kernel", "_attend_kernel", "_fold_splits_kernel", "_rope_kernel"} <= names
    assert {"_norm_kernel", "_combine_kernel", "_penalty_kernel", "_uniform_kernel"} <= names
    for kernel in kernels:
        assert kernel["cubin"] > 0
        assert kernel["shared"] <= SMALL_SHARED_MEMORY, kernel
        if kernel["name"] in ("_matmul_kernel", "_attend_kernel"):
            assert kernel["tensor_core"] == (kernel["format"] != "F32"), kernel
