"""The ranks' ways to each other, by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from localllm.backends.parallel.communicator import UnreachableError
from localllm.backends.parallel.ranks import Ranks
from localllm.backends.parallel.stores import Store

# Longer than a step of a large model takes on a slow machine, and than an engine may be silent for
# a step. A rank that dies is noticed at once; this is for one that hangs, or a network that does.
PATIENCE = timedelta(seconds=240)


def library(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class RankCommunicator:
    """Implements `Communicator`, and brings rank 0 the logits of the last stage.

    Waits for all ranks to be made. A rank that ends makes what the others wait for fail with
    UnreachableError, on a GPU perhaps later and with another RuntimeError.
    """

    def __init__(self, ranks: Ranks, rank: int, store: Store, device: torch.device) -> None:
        self._device = device
        self._next = rank + ranks.tensor
        self._before = rank - ranks.tensor
        self._with_logits = ranks.with_logits
        self._sent: list[tuple[dist.Work, Tensor]] = []
        stage, _ = ranks.place(rank)
        with _reaching():
            dist.init_process_group(
                library(device),
                store=store,
                rank=rank,
                world_size=ranks.count,
                timeout=PATIENCE,
                device_id=device if device.type == "cuda" else None,
            )
            # Every rank takes part in making every group.
            groups = [dist.new_group(ranks.of_stage(s), PATIENCE) for s in range(ranks.stages)]
        self._group = groups[stage]

    def gather(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        if not len(x):
            return [x.new_empty(0, width) for width in widths]
        widest = max(widths)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths]
        with _reaching():
            dist.all_gather(parts, own, group=self._group)
        return [part[:, :width] for part, width in zip(parts, widths, strict=True)]

    def send(self, x: Tensor) -> None:
        self._send(x, self._next)

    def receive(self, rows: int, width: int) -> Tensor:
        return self._receive(rows, width, self._before)

    def send_logits(self, logits: Tensor) -> None:
        """To rank 0."""
        self._send(logits, 0)

    def receive_logits(self, rows: int, vocab: int) -> Tensor:
        """From the last stage."""
        return self._receive(rows, vocab, self._with_logits)

    def flush(self) -> None:
        """Waits until all that was sent has left."""
        with _reaching():
            for work, _ in self._sent:
                work.wait()
        self._sent.clear()

    def close(self) -> None:
        self._sent.clear()
        dist.destroy_process_group()

    def _send(self, x: Tensor, rank: int) -> None:
        if len(x):
            x = x.contiguous()
            with _reaching():
                work = dist.isend(x, rank)
            assert work is not None
            self._sent.append((work, x))  # which has to live as long

    def _receive(self, rows: int, width: int, rank: int) -> Tensor:
        x = torch.empty(rows, width, device=self._device)
        if rows:
            with _reaching():
                dist.recv(x, rank)
        return x


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UnreachableError(str(error)) from error
