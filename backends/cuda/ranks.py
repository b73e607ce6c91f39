"""What passes between the ranks of a program that is divided.

The bits are those of one order of the ranks, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import AllGather, AllReduce, Receive, Send
from localllm.backends.torch_common.arithmetic import added

if TYPE_CHECKING:
    from localllm.backends.cuda.lower import Context


def between_ranks(
    op: AllReduce | AllGather | Receive | Send,
) -> Callable[[Context], Tensor]:
    """Computes the op's output."""
    match op:
        case AllReduce():
            widths = [op.x.width] * op.ranks
            return lambda c: added(_others(c).gather(c.read(op.x).contiguous(), widths))
        case AllGather():
            return lambda c: torch.cat(_others(c).gather(c.read(op.x).contiguous(), op.widths), 1)
        case Receive():
            return lambda c: _others(c).receive(c.forward.shape.tokens, op.out.width)
        case Send():
            return lambda c: _sent(c.read(op.x).contiguous(), _others(c))


@dataclass(frozen=True)
class Rehearsing:
    """A Communicator without others, for steps that only warm up or take memory."""

    device: torch.device

    def gather(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        return [torch.zeros((len(x), width), device=self.device) for width in widths]

    def send(self, x: Tensor) -> None:
        """Goes nowhere."""

    def receive(self, rows: int, width: int) -> Tensor:
        return torch.zeros((rows, width), device=self.device)


def _others(context: Context) -> Communicator:
    if context.comm is None:
        raise ValueError("the program is one rank's part, and there are no other ranks")
    return context.comm


def _sent(x: Tensor, comm: Communicator) -> Tensor:
    comm.send(x)
    return x
