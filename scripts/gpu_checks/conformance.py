"""Whole models: the logits of the committed fixtures, and that they depend on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from gpu_checks.check import Check, Json, holds, identical
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray
from localllm.gguf import GGUFFile
from localllm.models import build_program

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "architectures"
FIRST = ("gemma3-dense", "llama-format-q4_k_s", "qwen3-dense", "starcoder2-dense")
LIMITS = {"float32": 1e-6, "bfloat16": 5e-3}  # of the NMSE against llama.cpp
REHEARSED_TOKENS = 2
CONTEXT = 64
MOST_TOKENS = 128  # of a step
CHUNK, REHEARSED_CHUNK = 7, 1


def run(check: Check) -> None:
    for number, (name, dtype) in enumerate(_cases(check.rehearsal)):
        if number % check.shards == check.shard:
            key = f"{name}, {dtype}"
            check.put(key, _case(check, name, dtype) if check.left() > 0 else "left out: no time")


def _cases(rehearsal: bool) -> list[tuple[str, str]]:
    """The most telling ones first."""
    if rehearsal:
        return [(FIRST[1], "float32")]
    names = sorted((p.stem for p in FIXTURES.glob("*.npz")), key=lambda n: (n not in FIRST, n))
    few, many = names[: len(FIRST)], names[len(FIRST) :]
    return [(n, d) for names in (few, many) for d in ("bfloat16", "float32") for n in names]


def _case(check: Check, name: str, dtype: str) -> Json:
    """`with graphs` are steps of a token for each sequence; all others run launch by launch."""
    with np.load(FIXTURES / f"{name}.npz") as data:
        count = REHEARSED_TOKENS if check.rehearsal else len(data["tokens"])
        tokens, expected = data["tokens"][:count], data["logits"][:count]
    backend = CudaBackend(dtype=dtype, device=check.device)
    whole = FIXTURES / f"{name}.gguf"
    path = whole if whole.exists() else next(FIXTURES.glob(f"{name}-00001-of-*.gguf"))
    with GGUFFile.open(path) as file:
        program = build_program(file, CONTEXT)
        runner = DirectRunner(
            backend, program, file.tensors, context=CONTEXT, max_seqs=3, max_tokens=MOST_TOKENS
        )
    ids, others = tokens.tolist(), [tokens[::-1].tolist(), tokens[1::2].tolist()]
    alone = runner.logits(ids, chunk=len(ids))[0]
    found: dict[str, Json] = {"nmse": holds(nmse(alone, expected), LIMITS[dtype])}
    cut = runner.logits(ids, chunk=REHEARSED_CHUNK if check.rehearsal else CHUNK)[0]
    found["in chunks"] = identical(np.array_equal(cut, alone))
    by_one = runner.logits(ids, chunk=1)[0]
    found["token by token, with graphs"] = identical(np.array_equal(by_one, alone))
    for way, chunk in (
        ("whole, in company", [len(ids), len(ids), len(ids)]),
        ("token by token, in company, with graphs", [1, 1, 1]),
        ("token by token, beside a prompt", [1, 3, len(ids)]),
    ):
        logits = runner.logits(ids, *others, chunk=chunk)[0]
        found[way] = identical(np.array_equal(logits, alone))
    if check.device == "cuda":
        recorded = _graphs(runner)
        found["graphs recorded"] = {"value": recorded, "goal": "> 0", "met": recorded > 0}
    return found


def _graphs(runner: DirectRunner) -> int:
    """A graph that CUDA refuses is only a line in the log; the step has no seam to ask for it."""
    graphs = cast(Any, runner.step)._graphs._graphs
    return sum(graph is not None for graph in graphs.values())


def nmse(actual: FloatArray, expected: FloatArray) -> float:
    return float(((actual - expected) ** 2).sum() / (expected**2).sum())
