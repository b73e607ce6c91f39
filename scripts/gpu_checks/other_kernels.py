"""Norms, activations, experts and the sampler against the reference backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gpu_checks.check import Check, Json, holds, identical
from localllm.backends.base import SamplingArrays, mask_words
from localllm.backends.cuda.kernels.elementwise import act_mul, add
from localllm.backends.cuda.kernels.layout import pack
from localllm.backends.cuda.kernels.moe import moe
from localllm.backends.cuda.kernels.norm import norm
from localllm.backends.cuda.kernels.sampling import DeviceSampling, sample
from localllm.backends.program import ActivationName, FloatArray
from localllm.backends.reference import ops
from localllm.backends.reference.sampling import sample as reference_sample
from localllm.gguf import TensorType

ERROR = 3e-6  # of the largest output
ROWS, WIDTH, VOCAB = 5, 1000, 5000
REHEARSED_VOCAB = 70
EXPERTS, EXPERT_WIDTH, FFN = 8, 256, 192
SAMPLED_ROWS = 64
ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


def _error(actual: torch.Tensor, expected: FloatArray) -> Json:
    difference = np.abs(actual.cpu().numpy() - expected).max() / np.abs(expected).max()
    return holds(float(difference), ERROR)


def _normal(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, np.float32)


def norms(check: Check) -> Json:
    rng = np.random.default_rng(1)
    x, residual = _normal(rng, ROWS, WIDTH), _normal(rng, ROWS, WIDTH)
    weight, bias = _normal(rng, WIDTH), _normal(rng, WIDTH)
    a, b, w, c = (torch.from_numpy(v).to(check.device) for v in (x, residual, weight, bias))
    found: dict[str, Json] = {}
    for kind, group in (("rms", WIDTH), ("layer", WIDTH), ("rms", 100)):
        out, sums = torch.empty_like(a), torch.empty_like(a)
        norm(a, w, c, out, eps=1e-5, kind=kind, group=group, residual=b, sum_out=sums)  # type: ignore[arg-type]
        expected = ops.norm(x + residual, weight, bias, eps=1e-5, kind=kind, group=group)  # type: ignore[arg-type]
        found[f"{kind} over {group}"] = _error(out, expected)
    add(a, b, sums)
    found["sum"] = _error(sums, x + residual)
    return found


def activations(check: Check) -> Json:
    rng = np.random.default_rng(2)
    gate, up = 3 * _normal(rng, ROWS, WIDTH), _normal(rng, ROWS, WIDTH)
    a, b = (torch.from_numpy(v).to(check.device) for v in (gate, up))
    found: dict[str, Json] = {}
    for act in ACTIVATIONS:
        out = torch.empty_like(a)
        act_mul(a, b, out, act)
        found[act] = _error(out, ops.activate(gate, act) * up)
    return found


def experts(check: Check) -> Json:
    """In float32, so that both sides choose the same experts and multiply the same numbers."""
    rng = np.random.default_rng(4)
    shapes = ((FFN, EXPERT_WIDTH), (FFN, EXPERT_WIDTH), (EXPERT_WIDTH, FFN))
    values = [_normal(rng, EXPERTS, *shape) / np.float32(16) for shape in shapes]
    weights = [
        pack(
            TensorType.F32,
            torch.from_numpy(v.reshape(-1, cols)).view(torch.uint8).to(check.device),
            rows,
            cols,
            EXPERTS,
        )
        for v, (rows, cols) in zip(values, shapes, strict=True)
    ]
    gate, up, down = weights
    x, logits = _normal(rng, ROWS, EXPERT_WIDTH), _normal(rng, ROWS, EXPERTS)
    a, b = (torch.from_numpy(v).to(check.device) for v in (x, logits))
    out, alone = torch.empty_like(a), torch.empty_like(a[:1])
    for some, to in ((slice(0, ROWS), out), (slice(0, 1), alone)):
        moe(
            a[some], b[some], gate, up, down, to,
            used=2, act="silu", gating="softmax", normalize=True, scale=1.5,
        )  # fmt: skip
    expected = ops.moe(
        x, logits, values[0], values[1], values[2],
        used=2, act="silu", gating="softmax", normalize=True, scale=1.5,
    )  # fmt: skip
    same = torch.equal(out[0], alone[0])
    return {"error": _error(out, expected), "alone and in company": identical(same)}


def sampler(check: Check) -> Json:
    """Every rule in some row: the tokens are the reference's. Bits count, as sums are ordered."""
    rng = np.random.default_rng(5)
    vocab = REHEARSED_VOCAB if check.rehearsal else VOCAB
    logits = 3 * _normal(rng, SAMPLED_ROWS, vocab)
    arrays = random_sampling(SAMPLED_ROWS, vocab, rng)
    sampling = DeviceSampling.from_host(arrays, check.device)
    tokens = sample(torch.from_numpy(logits).to(check.device), sampling).cpu().numpy()
    wrong = int((tokens != reference_sample(logits, arrays)).sum())
    return {"rows": SAMPLED_ROWS, "wrong tokens": holds(wrong, 1)}


def random_sampling(rows: int, vocab: int, rng: np.random.Generator) -> SamplingArrays:
    s = SamplingArrays.greedy(rows)
    s.temperature[:] = rng.choice([0, 0.3, 1, 2], rows)
    s.top_k[:] = rng.choice([0, 1, 7, 200], rows)
    s.top_p[:] = rng.choice([1, 0.9, 0.3], rows)
    s.min_p[:] = rng.choice([0, 0.05], rows)
    s.repetition_penalty[:] = rng.choice([1, 1.3], rows)
    s.presence_penalty[:] = rng.choice([0, 0.7], rows)
    s.frequency_penalty[:] = rng.choice([0, 0.4], rows)
    s.seed[:] = rng.integers(0, 2**64, rows, np.uint64)
    s.index[:] = rng.integers(0, 2**32, rows, np.uint32)
    history = [rng.permutation(vocab)[:8] for _ in range(rows)]
    s.history_start = np.arange(0, 8 * rows + 1, 8, dtype=np.int32)
    s.history_ids = np.concatenate(history).astype(np.int32)
    s.history_counts = rng.integers(0, 3, 8 * rows).astype(np.int32)
    s.mask_rows = rng.integers(-1, 2, rows).astype(np.int32)
    s.masks = rng.integers(0, 2**32, 2 * mask_words(vocab), np.uint32)
    return s


CASES: dict[str, Callable[[Check], Json]] = {
    "norms": norms,
    "activations": activations,
    "experts": experts,
    "sampler": sampler,
}
