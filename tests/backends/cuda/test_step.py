"""Steps that only warm up or take memory, and those of one rank of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.backends.base import Batch, StepLimits
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.cuda.caches import Caches
from localllm.backends.cuda.step import CudaStep
from localllm.backends.cuda.weights import Weights
from localllm.backends.program import (
    AllGather,
    AllReduce,
    Embed,
    Program,
    Receive,
    Send,
    Value,
)
from localllm.errors import InsufficientMemoryError
from localllm.gguf import TensorType
from tests.backends.cpu.programs import PROGRAMS, make_tensor, random_tensors

pytestmark = pytest.mark.torch


def test_rehearsals_touch_nobodys_block_and_leave_answers_alone() -> None:
    program = PROGRAMS["experts"]()
    backend = CudaBackend("float32", "cpu")
    weights = backend.load(program, random_tensors(program, lambda _: TensorType.Q8_0), print)
    caches = backend.alloc_kv(program.kv_groups, [2])
    step = backend.compile(program, weights, caches, StepLimits(6, 3, 5, 300), print)
    batch = Batch.first_tokens(2, 1)
    step.submit(batch)
    expected = step.collect(), step.logits()
    before = caches.layers[0][0].keys.clone()
    step.fill()
    for tokens in (1, 2, 6):
        step._rehearse(tokens, 1, 512)
    after = caches.layers[0][0].keys
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    step.submit(batch)
    assert np.array_equal(step.collect(), expected[0])
    assert np.array_equal(step.logits(), expected[1])


class Echo:
    """Other ranks that have the same, or a thousand times as much for each rank before."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def gather(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        assert all(width == x.shape[1] for width in widths)
        return [x * 1000**rank for rank in range(len(widths))]

    def send(self, x: Tensor) -> None:
        self.sent.append(x.clone())

    def receive(self, rows: int, width: int) -> Tensor:
        return torch.full((rows, width), 3.0)


def compiled(program: Program, comm: Echo | None) -> CudaStep:
    values = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)
    tensors = {name: make_tensor(name, TensorType.F32, values) for name in program.weights()}
    backend = CudaBackend("float32", "cpu", comm=comm)
    weights = backend.load(program, tensors, print)
    return backend.compile(program, weights, Caches([], []), StepLimits(4, 4, 4, 16), print)


def first_ids(*ids: int) -> Batch:
    batch = Batch.first_tokens(len(ids), 0)
    batch.ids[:] = ids
    return batch


def new(program: Program, width: int) -> Value:
    program.buffers.append((width, "T"))
    return Value(len(program.buffers) - 1, 0, width, width, "T")


def last_stage() -> Program:
    """Rows 4..8 of an embedding, with what the stage before and another rank have."""
    p = Program({"embed": (4, 32)})
    rows, total, received, wide = (new(p, width) for width in (32, 32, 32, 64))
    p.ops += [
        Embed(rows, "embed", first_row=4),
        AllReduce(total, rows, 2),
        Receive(received),
    ]
    x = p.add(total, received)
    p.ops.append(AllGather(wide, x, (32, 32)))
    p.finish(p.select_rows(wide))
    return p


def test_what_ranks_have_is_put_together() -> None:
    step = compiled(last_stage(), Echo())
    batch = first_ids(3, 4, 7, 8)
    batch.logit_rows = np.arange(4, dtype=np.int32)
    batch.sampling = type(batch.sampling).greedy(4)
    step.submit(batch)
    own = np.zeros((4, 32), np.float32)
    own[1], own[2] = np.arange(32), np.arange(96, 128)
    x = own + own * 1000 + 3
    assert np.array_equal(step.logits(), np.concatenate([x, x * 1000], axis=1))


def sending() -> Program:
    p = Program({"embed": (4, 32)})
    x = p.embed("embed")
    p.ops.append(Send(new(p, 32), x))
    return p


def test_a_stage_before_the_last_sends_and_samples_nothing() -> None:
    echo = Echo()
    step = compiled(sending(), echo)
    step._rehearse(2, 1, 256)
    assert echo.sent == [], "a rehearsal is for this rank alone"
    step.submit(first_ids(2, 1))
    assert step.collect().size == 0
    assert len(echo.sent) == 1
    assert echo.sent[0][:, 0].tolist() == [64.0, 32.0]


def test_a_rank_needs_others() -> None:
    with pytest.raises(ValueError, match="no other ranks"):
        compiled(sending(), None).submit(first_ids(2))


SHORT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB of which 1.5 GiB is free. A"
)


@pytest.mark.parametrize("late", [False, True])
def test_too_little_memory_for_the_model_is_told_with_numbers(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(SHORT)

    program = PROGRAMS["plain"]()
    tensors = random_tensors(program, lambda _: TensorType.Q8_0)
    backend = CudaBackend("float32", "cpu")
    if not late:
        monkeypatch.setattr(Weights, "load", fail)
        with pytest.raises(InsufficientMemoryError, match=r"2\.00 GiB.* 1\.5 GiB is free$"):
            backend.load(program, tensors, print)
        return
    weights = backend.load(program, tensors, print)
    caches = backend.alloc_kv(program.kv_groups, [2])
    step = backend.compile(program, weights, caches, StepLimits(2, 2, 2, 32), print)
    monkeypatch.setattr(step, "_forward", fail)
    with pytest.raises(InsufficientMemoryError, match=r"does not hold the model.*2\.00 GiB"):
        step.warmup()
