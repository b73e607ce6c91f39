"""Ranks as threads of one process, that talk through queues and take turns otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Lock
from typing import TypeAlias

import torch

from localllm.backends.base import Backend
from localllm.backends.direct import DirectRunner
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.parallel.shard import Piece
from localllm.backends.parallel.slices import sliced
from localllm.backends.program import FloatArray
from localllm.gguf import Tensor

_SECONDS = 60  # until a rank that hears nothing gives up
Place: TypeAlias = tuple[int, int]  # stage and tensor rank


class _Mail:
    """What is on its way. Whoever waits lets another rank compute."""

    def __init__(self) -> None:
        self.turn = Lock()
        self._queues: dict[tuple[Place, Place], Queue[torch.Tensor]] = {}

    def put(self, sender: Place, receiver: Place, x: torch.Tensor) -> None:
        self._queue(sender, receiver).put(x.clone())

    def get(self, sender: Place, receiver: Place) -> torch.Tensor:
        queue = self._queue(sender, receiver)
        self.turn.release()
        try:
            return queue.get(timeout=_SECONDS)
        finally:
            self.turn.acquire()

    def _queue(self, sender: Place, receiver: Place) -> Queue[torch.Tensor]:
        return self._queues.setdefault((sender, receiver), Queue())


class ThreadCommunicator:
    """Implements `Communicator` for one of `ranks` tensor ranks of a stage."""

    def __init__(self, mail: _Mail, stage: int, rank: int, ranks: int) -> None:
        self._mail, self._stage, self._rank, self._ranks = mail, stage, rank, ranks
        self._own = (stage, rank)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        assert len(widths) == self._ranks
        assert x.shape[1] == widths[self._rank]
        stage = [(self._stage, rank) for rank in range(self._ranks)]
        for rank in stage:
            self._mail.put(self._own, rank, x)
        found = [self._mail.get(rank, self._own) for rank in stage]
        assert [part.shape[1] for part in found] == list(widths)
        return found

    def send(self, x: torch.Tensor) -> None:
        self._mail.put(self._own, (self._stage + 1, self._rank), x)

    def receive(self, rows: int, width: int) -> torch.Tensor:
        x = self._mail.get((self._stage - 1, self._rank), self._own)
        assert x.shape == (rows, width)
        return x


def logits_of_ranks(
    pieces: Sequence[Sequence[Piece]],
    tensors: Mapping[str, Tensor],
    backend: Callable[[Communicator], Backend],
    *sequences: Sequence[int],
    context: int,
    chunk: int,
    max_tokens: int = 512,
) -> list[list[FloatArray]]:
    """Of each tensor rank of the last stage, the logits of each sequence."""
    mail, ranks = _Mail(), len(pieces[0])

    def run(stage: int, rank: int) -> list[FloatArray]:
        piece = pieces[stage][rank]
        with mail.turn:
            runner = DirectRunner(
                backend(ThreadCommunicator(mail, stage, rank, ranks)),
                piece.program,
                sliced(tensors, piece.slices),
                context=context,
                max_seqs=len(sequences),
                max_tokens=max_tokens,
            )
            return runner.logits(*sequences, chunk=chunk)

    with ThreadPoolExecutor(len(pieces) * ranks) as pool:
        futures = [
            [pool.submit(run, stage, rank) for rank in range(ranks)] for stage in range(len(pieces))
        ]
        return [[future.result() for future in stage] for stage in futures][-1]
