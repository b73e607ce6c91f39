"""Ranks as processes over gloo, led by this one: logits, company, memory, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")

from localllm.backends.base import mask_words  # noqa: E402
from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.parallel.backend import ParallelBackend  # noqa: E402
from localllm.backends.program import Program  # noqa: E402
from localllm.backends.selection import select  # noqa: E402
from localllm.config import EngineConfig  # noqa: E402
from localllm.errors import EngineError, GGUFError  # noqa: E402
from localllm.gguf import GGUFFile  # noqa: E402
from localllm.models import build_program, trained_context  # noqa: E402
from tests.helpers import FIXTURES, architecture_cases  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
SIZES = {"tensor": (2, 1), "pipeline": (1, 2), "both": (2, 2)}
LONG = architecture_cases("qwen3-long") or architecture_cases("gemma3-dense")
END_SECONDS = 20


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@contextmanager
def led(model: Path, tensor: int, stages: int) -> Iterator[ParallelBackend]:
    """Afterwards none of the ranks is left."""
    config = EngineConfig(
        model=model,
        backend="torch",
        device="cpu",
        threads=1,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
    )
    backend = select(config).backend
    assert isinstance(backend, ParallelBackend)
    ranks = rank_processes()
    try:
        assert len(ranks) == tensor * stages - 1
        yield backend
    finally:
        backend.close()
        _, alive = psutil.wait_procs(ranks, timeout=END_SECONDS)
    assert not alive


def rank_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "localllm.backends.parallel.worker" in child.cmdline()]


@contextmanager
def opened(model: Path) -> Iterator[tuple[GGUFFile, Program]]:
    with GGUFFile.open(model) as file:
        yield file, build_program(file, trained_context(file))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_logits_are_llama_cpps_whatever_the_company(case: Any, sizes: tuple[int, int]) -> None:
    tokens, expected = case.tokens().tolist(), case.logits()
    with led(case.gguf, *sizes) as backend, opened(case.gguf) as (file, program):
        context = trained_context(file)
        runner = DirectRunner(backend, program, file.tensors, context=context, max_seqs=3)
        (whole,) = runner.logits(tokens, chunk=len(tokens))
        assert np.mean(np.square(whole - expected)) < 1e-6 * np.mean(np.square(expected))
        others = tokens[::-1], tokens[3:]
        mixed, _, shifted = runner.logits(tokens, *others, chunk=[137, 190, 164])
        assert np.array_equal(mixed, whole)
        (alone,) = runner.logits(others[1], chunk=len(tokens))
        assert np.array_equal(shifted, alone)
        (single,) = runner.logits(tokens[:20], chunk=1)
        assert np.array_equal(single, whole[:20])


def test_stages_cut_a_long_step_and_not_a_short_one() -> None:
    sequences = [[5 + (i * step) % 90 for i in range(250)] for step in (1, 7)]
    with led(TINY, 1, 2) as backend, opened(TINY) as (file, program):
        runner = DirectRunner(backend, program, file.tensors, context=256, max_seqs=2)
        together = runner.logits(*sequences, chunk=[250, 219])
        for sequence, found in zip(sequences, together, strict=True):
            (alone,) = runner.logits(sequence, chunk=50)
            assert np.array_equal(found, alone)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_masks_hold_and_may_come_late(sizes: tuple[int, int]) -> None:
    with led(TINY, *sizes) as backend, opened(TINY) as (file, program):
        runner = DirectRunner(backend, program, file.tensors, context=64)
        batch = runner.batch([(0, 0, [5, 6, 7])])
        assert program.logits is not None
        batch.sampling.mask_rows = np.array([-1, 0, 1], np.int32)
        batch.sampling.masks = np.zeros(2 * mask_words(program.logits.width), np.uint32)
        runner.step.submit(batch)
        allowed = np.split(batch.sampling.masks, 2)
        allowed[0][42 // 32] = 1 << 42 % 32
        allowed[1][7 // 32] = 1 << 7 % 32
        free, *drawn = runner.step.collect().tolist()
        assert free == int(np.argmax(runner.step.logits()[0]))
        assert drawn == [42, 7]


def test_memory_is_the_least_ranks_times_their_number() -> None:
    with led(TINY, 2, 1) as backend, opened(TINY) as (file, program):
        machine = psutil.virtual_memory()
        assert backend.memory().total <= machine.total
        assert backend.memory().available <= machine.available * 1.5
        backend.load(program, file.tensors, lambda _: None)
        (group,) = program.kv_groups
        heads = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in group.layers)
        assert backend.kv_block_bytes(group) == 16 * 4 * heads, "two halves"
        assert backend.threads == 2
        assert backend.describe().endswith("on 2 ranks (tensor 2, pipeline 1) over gloo")


def test_a_rank_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.backends.parallel.distributed.PATIENCE", timedelta(seconds=10))
    with led(TINY, 2, 1) as backend, opened(TINY) as (file, program):
        runner = DirectRunner(backend, program, file.tensors, context=128)
        (rank,) = rank_processes()
        rank.suspend()
        with pytest.raises(EngineError, match="the ranks do not reach each other"):
            runner.logits([1, 2, 3], chunk=3)


def test_what_another_rank_does_not_find_is_told(tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(TINY.read_bytes())
    with led(copy, 2, 1) as backend, opened(TINY) as (file, program):
        copy.write_bytes(b"GGUF and no more")
        with pytest.raises(GGUFError, match=r"rank 1 \(pid \d+\): "):
            backend.load(program, file.tensors, lambda _: None)
