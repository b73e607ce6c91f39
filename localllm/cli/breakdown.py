"""`localllm bench --breakdown`: where the time of a step goes, per kind of operation."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from localllm.backends.base import Batch, SamplingArrays
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.cpu.machine import Machine, measure_machine
from localllm.backends.cpu.profile import Share, break_down
from localllm.backends.cpu.step import CpuStep
from localllm.backends.direct import DirectRunner, Part
from localllm.cli.measure import Workload
from localllm.config import EngineConfig
from localllm.errors import RequestError
from localllm.gguf import GGUFFile
from localllm.models import build_program

_PREFILL_REPEATS = 3
_DECODE_REPEATS = 15


def breakdown(config: EngineConfig, work: Workload) -> str:
    """Markdown tables of two steps: one reads `work.prompt_tokens`, the other writes one token of
    each of `work.batch` sequences that have `work.depth` tokens behind them.

    RequestError when something else than the CPU's own kernels is asked for.
    """
    if config.backend not in ("auto", "cpu") or config.device not in ("auto", "cpu"):
        raise RequestError("breakdown knows the CPU's own kernels alone", param="breakdown")
    if config.ranks > 1:
        raise RequestError("breakdown knows steps of one rank alone", param="breakdown")
    backend = CpuBackend(config.threads, config.isa)
    try:
        steps = _Steps(backend, config.model, work)
        machine = measure_machine(backend.threads)
        parts = [
            f"{config.model.name} on {backend.describe()}",
            f"This machine reads {machine.read_bytes / 1e9:.1f} GB/s and adds up "
            f"{machine.int8_products / 1e9:.0f} G int8 or {machine.f32_products / 1e9:.0f} G "
            "float32 products a second.",
            steps.prefill(machine),
            steps.decode(machine),
        ]
        return "\n\n".join(parts)
    finally:
        backend.close()


class _Steps:
    def __init__(self, backend: CpuBackend, model: Path, work: Workload) -> None:
        self._work = work
        self._chunk = max(work.prompt_tokens, work.batch)
        context = max(work.prompt_tokens, work.depth + 1)
        with GGUFFile.open(model) as file:
            program = build_program(file, context)
            self._runner = DirectRunner(
                backend,
                program,
                file.tensors,
                context=context,
                max_seqs=work.batch,
                max_tokens=self._chunk,
            )
        assert program.logits is not None
        self._vocab = program.logits.width
        self._random = random.Random(0)

    def prefill(self, machine: Machine) -> str:
        tokens = self._work.prompt_tokens
        batch = self._batch([(0, 0, self._ids(tokens))])
        return self._table(f"Prefill of {tokens} tokens", batch, _PREFILL_REPEATS, machine)

    def decode(self, machine: Machine) -> str:
        work = self._work
        for number in range(work.batch):
            for start in range(0, work.depth, self._chunk):
                length = min(self._chunk, work.depth - start)
                self._run(self._batch([(number, start, self._ids(length))]))
        batch = self._batch([(number, work.depth, self._ids(1)) for number in range(work.batch)])
        title = f"Decode at depth {work.depth}"
        if work.batch > 1:
            title += f", {work.batch} sequences together"
        return self._table(title, batch, _DECODE_REPEATS, machine)

    def _table(self, title: str, batch: Batch, repeats: int, machine: Machine) -> str:
        step = self._runner.step
        assert isinstance(step, CpuStep)
        whole = statistics.median(self._run(batch) for _ in range(repeats))
        return table(title, whole, break_down(step, batch, repeats), machine)

    def _batch(self, parts: Sequence[Part]) -> Batch:
        """Asks for one token of each sequence, as the engine does."""
        batch = self._runner.batch(parts)
        return dataclasses.replace(
            batch, logit_rows=batch.query_start[1:] - 1, sampling=SamplingArrays.greedy(len(parts))
        )

    def _run(self, batch: Batch) -> float:
        """Seconds of the step, its calls overlapping where they can."""
        began = time.perf_counter()
        self._runner.step.submit(batch)
        self._runner.step.collect()
        return time.perf_counter() - began

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]


def table(title: str, whole: float, shares: Sequence[Share], machine: Machine) -> str:
    """`whole`: seconds of the step as it runs when nobody looks."""
    one_by_one = sum(share.seconds for share in shares)
    floor = sum(share.floor(machine) for share in shares)
    lines = [
        f"{title}: {_ms(whole)} ms; call by call:",
        "",
        "| operation | calls | ms | of all | floor, ms | times the floor |",
        "|---|---:|---:|---:|---:|---|",
        *(_row(share, one_by_one, machine) for share in shares),
        f"| all | {sum(share.calls for share in shares)} | {_ms(one_by_one)} | 100 % "
        f"| {_ms(floor)} | {one_by_one / floor:.2f} |",
    ]
    return "\n".join(lines)


def _row(share: Share, one_by_one: float, machine: Machine) -> str:
    percent = f"{100 * share.seconds / one_by_one:.1f} %"
    cells = [share.kind, str(share.calls), _ms(share.seconds), percent]
    floor = share.floor(machine)
    cells += (
        [_ms(floor), f"{share.seconds / floor:.2f} ({share.bound(machine)})"] if floor else [""] * 2
    )
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
