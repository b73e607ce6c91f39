"""Ranks as threads of one process, that talk through queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch

from localllm.backends.direct import DirectRunner
from localllm.backends.parallel.shard import Piece
from localllm.backends.parallel.slices import sliced
from localllm.backends.program import FloatArray
from localllm.backends.torch_common.backend import TorchBackend
from localllm.gguf import Tensor

_SECONDS = 60  # until a rank that hears nothing gives up


class _Mail:
    """What is on its way, by who sends it and to whom."""

    def __init__(self) -> None:
        self._queues: dict[tuple[object, object], Queue[torch.Tensor]] = {}

    def between(self, sender: object, receiver: object) -> Queue[torch.Tensor]:
        return self._queues.setdefault((sender, receiver), Queue())


class ThreadCommunicator:
    """Implements `Communicator` for tensor rank `rank` of `ranks` in a stage."""

    def __init__(self, mail: _Mail, stage: int, rank: int, ranks: int) -> None:
        self._mail, self._stage, self._rank, self._ranks = mail, stage, rank, ranks

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        assert len(widths) == self._ranks
        assert x.shape[1] == widths[self._rank]
        own = (self._stage, self._rank)
        for rank in range(self._ranks):
            self._mail.between(own, (self._stage, rank)).put(x)
        found = [
            self._mail.between((self._stage, rank), own).get(timeout=_SECONDS)
            for rank in range(self._ranks)
        ]
        assert [part.shape[1] for part in found] == list(widths)
        return found

    def send(self, x: torch.Tensor) -> None:
        own, after = (self._stage, self._rank), (self._stage + 1, self._rank)
        self._mail.between(own, after).put(x)

    def receive(self, rows: int, width: int) -> torch.Tensor:
        before, own = (self._stage - 1, self._rank), (self._stage, self._rank)
        x = self._mail.between(before, own).get(timeout=_SECONDS)
        assert x.shape == (rows, width)
        return x


def logits_of_ranks(
    pieces: Sequence[Sequence[Piece]],
    tensors: Mapping[str, Tensor],
    dtype: str,
    *sequences: Sequence[int],
    context: int,
    chunk: int,
) -> list[list[FloatArray]]:
    """Of each tensor rank of the last stage, the logits of each sequence."""
    mail, ranks = _Mail(), len(pieces[0])
    backends = [
        [
            TorchBackend("cpu", dtype, threads=1, comm=ThreadCommunicator(mail, stage, rank, ranks))
            for rank in range(ranks)
        ]
        for stage in range(len(pieces))
    ]

    def run(stage: int, rank: int) -> list[FloatArray]:
        piece = pieces[stage][rank]
        runner = DirectRunner(
            backends[stage][rank],
            piece.program,
            sliced(tensors, piece.slices),
            context=context,
            max_seqs=len(sequences),
        )
        return runner.logits(*sequences, chunk=chunk)

    with ThreadPoolExecutor(len(pieces) * ranks) as pool:
        futures = [
            [pool.submit(run, stage, rank) for rank in range(ranks)] for stage in range(len(pieces))
        ]
        return [[future.result() for future in stage] for stage in futures][-1]
