"""A GPU machine may have numpy, torch and Triton, and little else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.torch

_SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is not installed here")

REFUSED = {"gguf", "numba", "llvmlite", "fastapi", "pydantic", "psutil", "typer", "tokenizers",
           "sentencepiece", "jinja2", "huggingface_hub", "llguidance", "prometheus_client"}
sys.meta_path.insert(0, Refuse())
from localllm.backends.base import StepLimits
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.program import Program

backend = CudaBackend("float32", "cpu")
p = Program({"embed": (9, 64)})
p.finish(p.linear(p.select_rows(p.embed("embed")), "embed", shard="vocab", biases=[None]))
import mmap
from localllm.gguf import Tensor, TensorType
tensors = {"embed": Tensor("embed", TensorType.F32, (9, 64), 9 * 256, mmap.mmap(-1, 9 * 256), 0)}
weights = backend.load(p, tensors, print)
step = backend.compile(p, weights, backend.alloc_kv([], []), StepLimits(2, 2, 2, 16), print)
step.warmup()
print(step.collect().tolist())
"""


def test_it_needs_no_more_than_numpy_torch_and_triton() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[0]"
