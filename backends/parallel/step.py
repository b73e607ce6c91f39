"""A step of all ranks, as rank 0 leads it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import Batch, Int32Array
from localllm.backends.parallel.crew import Crew
from localllm.backends.parallel.distributed import RankCommunicator
from localllm.backends.parallel.messages import Run, WarmUp
from localllm.backends.parallel.stage import Stage
from localllm.backends.parallel.wire import pack
from localllm.backends.program import FloatArray, Program
from localllm.backends.torch_common.sampling import sample


class ParallelStep:
    """Implements `backends.base.Step` for `program`, of which `stage` is rank 0's part.

    Raises EngineError when a rank is lost; there are no steps after that.
    """

    def __init__(
        self, program: Program, stage: Stage, crew: Crew, comm: RankCommunicator, alone: bool
    ) -> None:
        assert program.logits is not None
        self._vocab = program.logits.width
        self._groups = len(program.kv_groups)
        self._stage, self._step = stage, stage.step
        self._crew, self._comm = crew, comm
        self._alone = alone  # rank 0's stage is the last one too: its own logits are the step's
        self._batch: Batch | None = None
        self._parts: list[Batch] = []
        self._logits: Tensor | None = None

    def warmup(self) -> None:
        self._crew.tell(WarmUp())
        with self._crew.working():
            self._step.warmup()
            self._comm.flush()
            self._crew.answers()
        self.submit(Batch.first_tokens(1, self._groups))
        self.collect()

    def submit(self, batch: Batch) -> None:
        self._crew.tell(Run(pack(batch)))
        with self._crew.working(done=False):
            if self._alone:
                self._step.submit(batch)
            else:
                self._parts = self._stage.run(batch)
        self._batch = batch

    @torch.inference_mode()
    def collect(self) -> Int32Array:
        if self._batch is None:
            raise RuntimeError("nothing was submitted")
        with self._crew.working():
            if self._alone:
                return self._step.collect()
            self._logits = self._received()
            return sample(self._logits, self._batch.sampling)

    def logits(self) -> FloatArray:
        if self._alone:
            return self._step.logits()
        if self._logits is None:
            raise RuntimeError("nothing was collected")
        rows: FloatArray = self._logits.cpu().numpy()
        return rows

    def trace(self, batch: Batch) -> list[FloatArray]:
        """Of the ops of rank 0's own program."""
        self._crew.tell(Run(pack(batch)))
        with self._crew.working():
            self._parts = self._stage.parts(batch)
            traces = [self._step.trace(part) for part in self._parts]
            if not self._alone:
                self._received()
        return [np.concatenate(rows) for rows in zip(*traces, strict=True)]

    def _received(self) -> Tensor:
        sizes = [part.logit_rows.size for part in self._parts]
        return torch.cat([self._comm.receive_logits(size, self._vocab) for size in sizes])
