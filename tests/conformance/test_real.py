"""Two published models over a whole text: tokens, the oracle, and how far the CPU is from it.

The file gives llama.cpp's logits for dequantized weights at a few positions, likelihoods at all,
and how far llama.cpp's own quantized arithmetic is from them (`peer_mean_kl`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.base import Backend
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import GGUFFile
from localllm.models import build_program
from localllm.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

CHUNK = 64  # rows of logits in memory at once: 64 MB each for 262,144 tokens
CONTEXT = 512

# Activations are rounded to 8 bits, so the last bit of any float sum before decides some of the
# roundings: sums in another order, no less exact, move the mean over the text by a few per cent.
CHANCE = 1.05


@dataclass(frozen=True)
class RealModel:
    path: Path
    text: str
    truth: dict[str, npt.NDArray[Any]]


@dataclass
class Measured:
    """What is kept of logits that are too large to keep."""

    logits: list[FloatArray] = field(default_factory=list)  # at the truth's positions
    best: list[int] = field(default_factory=list)  # the most likely token of every position
    nll: list[float] = field(default_factory=list)  # of every token but the first
    kl: list[float] = field(default_factory=list)  # of the CPU from the oracle, every position


@pytest.fixture(scope="module", params=["smollm2-135m-instruct.q4_1", "gemma-3-270m.q4_k_m"])
def model(request: pytest.FixtureRequest, conformance: Path) -> RealModel:
    path = request.getfixturevalue("smollm2" if "smollm2" in request.param else "gemma3")
    folder = conformance / "real"
    with np.load(folder / f"{request.param}.npz") as data:
        truth = dict(data)
    return RealModel(path, (folder / "text.txt").read_text(), truth)


@pytest.fixture(scope="module")
def measured(model: RealModel) -> Measured:
    from localllm.backends.cpu.backend import CpuBackend

    tokens = model.truth["tokens"].tolist()
    positions = set(model.truth["positions"].tolist())
    result = Measured()
    with (
        _runner(ReferenceBackend(), model.path) as oracle,
        _runner(CpuBackend(), model.path) as cpu,
    ):
        for at, (expected, found) in enumerate(
            zip(oracle.steps(tokens, chunk=CHUNK), cpu.steps(tokens, chunk=CHUNK), strict=True)
        ):
            rows = range(at * CHUNK, at * CHUNK + len(expected[0]))
            log_p = _log_softmax(expected[0])
            result.logits += [expected[0][r - rows[0]].copy() for r in rows if r in positions]
            result.best += expected[0].argmax(axis=1).tolist()
            following = tokens[rows[0] + 1 : rows[-1] + 2]
            result.nll += [-float(log_p[i, token]) for i, token in enumerate(following)]
            result.kl += _kl(log_p, _log_softmax(found[0])).tolist()
    return result


def test_tokens_are_the_same(model: RealModel) -> None:
    tokenizer = load_tokenizer(model.path)
    assert tokenizer.encode(model.text) == model.truth["tokens"].tolist()


def test_the_oracle_agrees(model: RealModel, measured: Measured) -> None:
    expected = model.truth["logits"].astype(np.float32)
    found = np.stack(measured.logits)
    half_a_step = np.spacing(model.truth["logits"]).astype(np.float32)
    assert (np.abs(found - expected) <= half_a_step + 2e-3 * np.abs(expected).max()).all()
    assert np.square(found - expected).mean() < 1e-6 * np.square(expected).mean()
    assert np.mean(np.array(measured.best) == model.truth["argmax"]) > 0.99
    np.testing.assert_allclose(measured.nll, model.truth["nll"], atol=0.02)
    assert np.mean(measured.nll) == pytest.approx(model.truth["nll"].mean(), abs=2e-4)


def test_the_cpu_is_no_farther_off_than_llama_cpp(model: RealModel, measured: Measured) -> None:
    assert len(measured.kl) == len(model.truth["tokens"])
    assert 0 < np.mean(measured.kl) <= CHANCE * model.truth["peer_mean_kl"]


@contextmanager
def _runner(backend: Backend, path: Path) -> Iterator[DirectRunner]:
    with GGUFFile.open(path) as file:
        program = build_program(file, CONTEXT)
        yield DirectRunner(backend, program, file.tensors, context=CONTEXT, max_tokens=CHUNK)
    backend.close()


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _kl(log_p: FloatArray, log_q: FloatArray) -> FloatArray:
    """Of q from p, row by row."""
    divergence: FloatArray = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return divergence
