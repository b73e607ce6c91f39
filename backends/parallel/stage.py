"""One rank's part of a step."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from localllm.backends.base import Backend, Batch, ProgressFn, Step, StepLimits
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.parallel.distributed import RankCommunicator
from localllm.backends.parallel.micro_batches import cut
from localllm.backends.parallel.ranks import Ranks
from localllm.backends.program import Program

# Of a micro-batch. With fewer, reading the weights again (on the CPU dequantizing them) takes more
# time than the stages gain by computing at once.
_LEAST_TOKENS = {"cpu": 128, "cuda": 256}


class RankStep(Step, Protocol):
    def device_logits(self) -> Tensor:
        """Raw logits [R, vocab] of the step last submitted; valid until the next."""


class RankBackend(Backend, Protocol):
    comm: Communicator | None

    def compile(
        self, program: Program, weights: Any, kv: Any, limits: StepLimits, progress: ProgressFn
    ) -> RankStep: ...


class Stage:
    """Runs every batch in the parts that all ranks agree upon, one after another.

    What it sends is on its way while it computes the next part.
    """

    def __init__(
        self, step: RankStep, comm: RankCommunicator, ranks: Ranks, rank: int, device: str
    ) -> None:
        self.step = step
        self._comm = comm
        self._stages = ranks.stages
        self._sends_logits = rank == ranks.with_logits != 0
        self._least_tokens = _LEAST_TOKENS[device]

    def parts(self, batch: Batch) -> list[Batch]:
        return cut(batch, self._stages, self._least_tokens)

    def run(self, batch: Batch) -> list[Batch]:
        """Returns the parts."""
        self._comm.flush()
        parts = self.parts(batch)
        for part in parts:
            self.step.submit(part)
            if self._sends_logits:
                self._comm.send_logits(self.step.device_logits().clone())
            self.step.collect()
        return parts
