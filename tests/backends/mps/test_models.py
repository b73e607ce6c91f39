"""Whole models on the backend for Apple's GPUs, with its kernels compiled for the CPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.mps.backend import MpsBackend  # noqa: E402
from localllm.backends.program import FloatArray  # noqa: E402
from localllm.gguf import GGUFFile  # noqa: E402
from localllm.models import build_program, trained_context  # noqa: E402
from tests.backends.mps.compiled import CompiledShaders, compiled_shaders  # noqa: E402
from tests.helpers import ArchitectureCase, architecture_cases  # noqa: E402

pytestmark = pytest.mark.torch

# The four formats with kernels, others between them, biases, windows, experts.
CASES = architecture_cases(
    "llama-format-q4_0",
    "llama-format-q4_k_s",
    "llama-format-q5_0",
    "llama-format-q6_k",
    "llama-moe",
    "gemma3-dense",
    "qwen3-dense",
    "starcoder2-dense",
)
TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3}
# With keys and values in bfloat16, one of llama-moe's tokens is routed to another expert.
EXPERTS_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


@pytest.fixture
def shaders() -> CompiledShaders:
    return compiled_shaders()


def runner(
    case: ArchitectureCase, shaders: CompiledShaders, dtype: str, seqs: int = 1
) -> DirectRunner:
    with GGUFFile.open(case.gguf) as file:
        context = trained_context(file)
        backend = MpsBackend(dtype, device="cpu", shaders=shaders)
        program = build_program(file, context)
        return DirectRunner(backend, program, file.tensors, context=context, max_seqs=seqs)


def nmse(found: FloatArray, expected: FloatArray) -> float:
    return float(np.square(found - expected).mean() / np.square(expected).mean())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_llama_cpps(case: ArchitectureCase, shaders: CompiledShaders) -> None:
    tokens = case.tokens().tolist()
    limits = EXPERTS_TOLERANCE if case.name.endswith("-moe") else TOLERANCE
    for dtype, tolerance in limits.items():
        (logits,) = runner(case, shaders, dtype).logits(tokens, chunk=len(tokens))
        assert nmse(logits, case.logits()) < tolerance, dtype
    assert shaders.launches


@pytest.mark.parametrize(
    "case", architecture_cases("llama-format-q4_0", "gemma3-dense"), ids=lambda case: case.name
)
def test_rows_do_not_depend_on_chunks_or_company(
    case: ArchitectureCase, shaders: CompiledShaders
) -> None:
    run, tokens = runner(case, shaders, "float32", seqs=2), case.tokens().tolist()
    (whole,) = run.logits(tokens, chunk=len(tokens))
    mixed, _ = run.logits(tokens, tokens[::-1], chunk=[5, 17])
    assert np.array_equal(mixed, whole)


def test_a_kernel_runs_wherever_there_is_one(shaders: CompiledShaders) -> None:
    """Of a file in Q4_0 whose output is Q6_K: the output matrix of each of two warm-up steps, and
    seven matrices per layer."""
    (case,) = architecture_cases("llama-format-q4_0")
    run = runner(case, shaders, "bfloat16")
    with GGUFFile.open(case.gguf) as file:
        layers = file.get_int("llama.block_count")
    shaders.launches.clear()
    run.logits([1, 2, 3], chunk=3)
    assert shaders.launches == ["matvec_q4_0"] * (7 * layers) + ["matvec_q6_k"]
