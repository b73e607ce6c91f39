"""torch on the CPU against llama.cpp's logits, and against itself in other chunks."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.program import FloatArray, Moe, Program  # noqa: E402
from localllm.backends.torch_common.backend import TorchBackend  # noqa: E402
from localllm.errors import UnsupportedArchitectureError  # noqa: E402
from localllm.gguf import GGUFFile  # noqa: E402
from localllm.models import build_program, trained_context  # noqa: E402
from tests.helpers import ArchitectureCase, architecture_cases  # noqa: E402

pytestmark = pytest.mark.torch

TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3}
# With float32 and the KV cache in q8_0; of experts, a near tie may route differently.
Q8_0_TOLERANCE, Q8_0_EXPERTS_TOLERANCE = 1e-3, 2e-2
Q8_0_CASES = ("llama-dense", "llama-moe", "gemma[23]-*", "qwen3-*", "*-5layers", "granitemoe-moe")
# A long period of layers, experts, a context beyond one tile.
CHUNKED = ("gemma3-7layers", "gemma3-dense", "llama-moe", "qwen3-long", "llama-format-q4_k_s")


def _build(file: GGUFFile) -> Program:
    try:
        return build_program(file, trained_context(file))
    except UnsupportedArchitectureError as error:
        pytest.skip(str(error))


def _runner(
    dtype: str, file: GGUFFile, program: Program, seqs: int = 1, kv_cache_dtype: str = "auto"
) -> DirectRunner:
    context = trained_context(file)
    backend = TorchBackend("cpu", dtype, kv_cache_dtype=kv_cache_dtype)
    return DirectRunner(backend, program, file.tensors, context=context, max_seqs=seqs)


def _nmse(found: FloatArray, expected: FloatArray) -> float:
    return float(np.mean(np.square(found - expected)) / np.mean(np.square(expected)))


@pytest.mark.parametrize("case", architecture_cases(), ids=lambda case: case.name)
def test_logits_are_llama_cpps(case: ArchitectureCase) -> None:
    with GGUFFile.open(case.gguf) as file:
        program, tokens = _build(file), case.tokens().tolist()
        for dtype, tolerance in TOLERANCE.items():
            (logits,) = _runner(dtype, file, program).logits(tokens, chunk=len(tokens))
            assert _nmse(logits, case.logits()) < tolerance, dtype


@pytest.mark.parametrize("case", architecture_cases(*Q8_0_CASES), ids=lambda case: case.name)
def test_logits_with_a_cache_in_q8_0_are_close(case: ArchitectureCase) -> None:
    with GGUFFile.open(case.gguf) as file:
        program, tokens = _build(file), case.tokens().tolist()
        run = _runner("float32", file, program, kv_cache_dtype="q8_0")
        (logits,) = run.logits(tokens, chunk=len(tokens))
    mixture = any(isinstance(op, Moe) for op in program.ops)
    tolerance = Q8_0_EXPERTS_TOLERANCE if mixture else Q8_0_TOLERANCE
    assert 1e-8 < _nmse(logits, case.logits()) < tolerance


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [*((dtype, "auto") for dtype in TOLERANCE), ("bfloat16", "q8_0")]
)
@pytest.mark.parametrize("case", architecture_cases(*CHUNKED), ids=lambda case: case.name)
def test_rows_do_not_depend_on_chunks_or_company(
    case: ArchitectureCase, dtype: str, kv_cache_dtype: str
) -> None:
    with GGUFFile.open(case.gguf) as file:
        runner = _runner(dtype, file, _build(file), seqs=3, kv_cache_dtype=kv_cache_dtype)
        tokens = case.tokens().tolist()
        (whole,) = runner.logits(tokens, chunk=len(tokens))
        others = tokens[::-1], tokens[3:]
        mixed, _, shifted = runner.logits(tokens, *others, chunk=[5, 9, 19])
        assert np.array_equal(mixed, whole)
        (alone,) = runner.logits(others[1], chunk=len(tokens))
        assert np.array_equal(shifted, alone)
