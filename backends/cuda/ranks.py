"""What passes between the ranks of a program that is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import AllGather, AllReduce, Receive, Send

if TYPE_CHECKING:
    from localllm.backends.cuda.lower import Context


def between_ranks(
    op: AllReduce | AllGather | Receive | Send, comm: Communicator
) -> Callable[[Context], Tensor]:
    """Computes the op's output."""
    match op:
        case AllReduce():
            return lambda c: _sum(comm.gather(c.read(op.x).contiguous(), [op.x.width] * op.ranks))
        case AllGather():
            return lambda c: torch.cat(comm.gather(c.read(op.x).contiguous(), op.widths), 1)
        case Receive():
            return lambda c: comm.receive(c.forward.shape.tokens, op.out.width)
        case Send():
            return lambda c: _sent(c.read(op.x), comm)


def _sum(parts: list[Tensor]) -> Tensor:
    """In rank order: how a library's own sum rounds depends on its size."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _sent(x: Tensor, comm: Communicator) -> Tensor:
    comm.send(x)
    return x
