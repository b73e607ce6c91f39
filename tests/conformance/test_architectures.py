"""Tiny random models of every architecture, against llama.cpp's logits for the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import Backend
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray, Moe, Program
from localllm.errors import UnsupportedArchitectureError
from localllm.gguf import GGUFFile
from localllm.models import ARCHITECTURES, build_program, trained_context
from tests.helpers import ArchitectureCase, architecture_cases

UNSUPPORTED = (
    "deepseek2-*",
    "falcon-h1-*",
    "glm4moe-*",
    "gpt-oss-*",
    "gpt2-*",
    "granitehybrid-*",
    "lfm2-*",
    "lfm2moe-*",
    "mamba2-*",
    "nemotron_h-*",
    "qwen2moe-*",
    "qwen35-*",
    "qwen35moe-*",
    "qwen3next-*",
)
TOLERANCE = {"reference": 1e-6, "cpu": 2.5e-3}
EXPERTS_TOLERANCE = {"reference": 1e-6, "cpu": 1e-2}  # a near tie may route differently

REFUSED = architecture_cases(*UNSUPPORTED)
SUPPORTED = [case for case in architecture_cases() if case not in REFUSED]


def _named(cases: list[ArchitectureCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def _build(file: GGUFFile) -> Program:
    return build_program(file, trained_context(file))


def _runner(backend: Backend, file: GGUFFile, program: Program, seqs: int = 1) -> DirectRunner:
    context = trained_context(file)
    return DirectRunner(backend, program, file.tensors, context=context, max_seqs=seqs)


def _nmse(found: FloatArray, expected: FloatArray) -> float:
    return float(np.mean(np.square(found - expected)) / np.mean(np.square(expected)))


@_named(SUPPORTED)
def test_logits_are_llama_cpps(case: ArchitectureCase, backend: Backend) -> None:
    with GGUFFile.open(case.gguf) as file:
        program = _build(file)
        tokens = case.tokens().tolist()
        (logits,) = _runner(backend, file, program).logits(tokens, chunk=len(tokens))
    mixture = any(isinstance(op, Moe) for op in program.ops)
    tolerance = (EXPERTS_TOLERANCE if mixture else TOLERANCE)[backend.name]
    assert _nmse(logits, case.logits()) < tolerance


@_named(SUPPORTED)
def test_rows_do_not_depend_on_chunks_or_company(case: ArchitectureCase, backend: Backend) -> None:
    with GGUFFile.open(case.gguf) as file:
        runner = _runner(backend, file, _build(file), seqs=3)
        tokens = case.tokens().tolist()
        (whole,) = runner.logits(tokens, chunk=len(tokens))
        for chunk in (1, 7):
            (chunked,) = runner.logits(tokens, chunk=chunk)
            assert np.array_equal(chunked, whole)
        others = tokens[::-1], tokens[3:]
        mixed, _, shifted = runner.logits(tokens, *others, chunk=[5, 1, 19])
        assert np.array_equal(mixed, whole)
        (alone,) = runner.logits(others[1], chunk=len(tokens))
        assert np.array_equal(shifted, alone)


@_named(REFUSED)
def test_other_architectures_are_refused_by_name(case: ArchitectureCase) -> None:
    with (
        GGUFFile.open(case.gguf) as file,
        pytest.raises(UnsupportedArchitectureError) as refusal,
    ):
        _build(file)
    assert repr(file.architecture) in str(refusal.value)
    assert all(known in str(refusal.value) for known in ARCHITECTURES)


def test_every_architecture_has_a_case() -> None:
    tested = set()
    for case in SUPPORTED:
        with GGUFFile.open(case.gguf) as file:
            tested.add(file.architecture)
    if len(SUPPORTED) < len(ARCHITECTURES):
        pytest.skip("only the choice in the tree is there")
    assert tested == set(ARCHITECTURES)
