"""Model files through the backend: llama.cpp's logits, and an engine that serves with it."""

from __future__ import annotations

import pytest

from localllm.backends import selection
from localllm.backends.base import StepLimits
from localllm.backends.cuda import fast
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray
from localllm.config import EngineConfig
from localllm.engine import loader
from localllm.engine.messages import Submit
from localllm.errors import RequestError
from localllm.gguf import GGUFFile, TensorType
from localllm.models import build_program, trained_context
from localllm.models.registry import ARCHITECTURES
from localllm.sampling_params import SamplingParams
from tests.backends.cpu.programs import PROGRAMS, nmse, random_tensors
from tests.backends.cuda.devices import DEVICES, on_gpu
from tests.helpers import FIXTURES, ArchitectureCase, architecture_cases

pytestmark = pytest.mark.torch

# Windows and soft-caps, head norms, experts, fused projections, layer norms with biases.
INTERPRETED = ("gemma2-dense", "qwen3-dense", "llama-moe", "phi3-dense", "starcoder2-dense")
FEW = 5  # tokens: the interpreter is slow


def logits_of(backend: CudaBackend, case: ArchitectureCase, tokens: list[int]) -> FloatArray:
    with GGUFFile.open(case.gguf) as file:
        program = build_program(file, trained_context(file))
        run = DirectRunner(
            backend, program, file.tensors, context=trained_context(file), max_tokens=len(tokens)
        )
        return run.logits(tokens, chunk=len(tokens))[0]


@pytest.mark.parametrize("case", architecture_cases(*INTERPRETED), ids=lambda case: case.name)
def test_logits_are_llama_cpps(case: ArchitectureCase) -> None:
    found = logits_of(CudaBackend("float32", "cpu"), case, case.tokens()[:FEW].tolist())
    assert nmse(found, case.logits()[:FEW]) < 1e-6


@pytest.mark.parametrize("case", architecture_cases("qwen3-dense"), ids=lambda case: case.name)
def test_logits_with_a_cache_in_q8_0_are_close(case: ArchitectureCase) -> None:
    backend = CudaBackend("float32", "cpu", kv_cache_dtype="q8_0")
    found = logits_of(backend, case, case.tokens()[:FEW].tolist())
    assert 1e-8 < nmse(found, case.logits()[:FEW]) < 1e-3
    assert "q8_0" in backend.describe()


def test_heads_that_no_scale_divides_are_refused() -> None:
    backend = CudaBackend("float32", "cpu", kv_cache_dtype="q8_0")
    with pytest.raises(RequestError, match="heads of 16 and 16") as caught:
        backend.kv_block_bytes(PROGRAMS["plain"]().kv_groups[0])
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        on_gpu(case, dtype, tolerance)
        for case in architecture_cases()
        for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 5e-3))
    ],
    ids=lambda value: value.name if isinstance(value, ArchitectureCase) else str(value),
)
def test_logits_are_llama_cpps_on_a_gpu(
    case: ArchitectureCase, dtype: str, tolerance: float
) -> None:
    with GGUFFile.open(case.gguf) as file:
        if file.architecture not in ARCHITECTURES:
            pytest.skip(f"{file.architecture} is not supported")
    found = logits_of(CudaBackend(dtype, "cuda"), case, case.tokens().tolist())
    assert nmse(found, case.logits()) < tolerance


@pytest.mark.parametrize(("name", "kind"), [("plain", TensorType.Q4_0), ("dense", TensorType.F16)])
def test_fast_products_are_close(
    name: str, kind: TensorType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slabs that end within a matrix, biases, residuals and gates."""
    program = PROGRAMS[name]()
    tensors = random_tensors(program, lambda _: kind)
    found = []
    for rows in ("_PLAIN_ROWS", "_QUANTIZED_ROWS"):
        monkeypatch.setattr(fast, rows, 3)
    monkeypatch.setattr(fast, "_SLAB_ELEMENTS", 64 * 70)
    for quick in (False, True):
        backend = CudaBackend("float32", "cpu", quick)
        assert ("fast" in backend.describe()) == quick
        run = DirectRunner(backend, program, tensors, context=16, max_tokens=4)
        found.append(run.logits([5, 6, 7, 8], chunk=4)[0])
    assert 0 < nmse(found[1], found[0]) < 1e-9


def generated(config: EngineConfig) -> dict[str, list[int]]:
    """Greedy tokens of three prompts that are served together."""
    core = loader.load_engine(config, print)
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    greedy = SamplingParams(max_tokens=2, temperature=0)
    for name, prompt in zip(tokens, ((3, 4), (5,), (6,)), strict=True):
        core.add(Submit(name, prompt, greedy, frozenset()))
    while core.has_work:
        for news in core.step().news:
            tokens[news.sequence_id] += news.tokens
    core.check_integrity()
    core.close()
    return tokens


def test_an_engine_generates_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's tokens, from steps of which some are filled up."""
    model = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
    config = EngineConfig(
        model=model, ctx_size=32, max_num_batched_tokens=4, max_num_seqs=4, backend="reference"
    )
    expected = generated(config)
    chosen = selection.Selection(CudaBackend("float32", "cpu"), "")
    monkeypatch.setattr(loader, "select", lambda _: chosen)
    assert generated(config) == expected
    assert all(len(ids) == 2 for ids in expected.values())


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_workspace_of_a_gpu_is_measured(device: str) -> None:
    program = PROGRAMS["dense"]()
    backend = CudaBackend("bfloat16", device)
    backend.load(program, random_tensors(program, lambda _: TensorType.Q8_0), print)
    limits = (StepLimits(n, 4, 8, 4096) for n in (64, 8192))
    small, large = (backend.workspace_bytes(program, limit) for limit in limits)
    assert 0 < small < large
