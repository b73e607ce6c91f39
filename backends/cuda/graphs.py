"""CUDA graphs: a step's launches, recorded once for each shape and replayed in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from localllm.backends.cuda.shapes import StepShape

_log = logging.getLogger(__name__)


class Graphs:
    """Recorded work of one step at a time. All graphs share their intermediate memory: what is to
    outlive a replay has to lie elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._enabled = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph | None] = {}

    def run(self, shape: StepShape, work: Callable[[], None]) -> None:
        """Does `work`, which has to launch the same at the same addresses for the same shape.

        The first time it is done launch by launch, which also compiles what it needs, and then
        recorded, which computes nothing.
        """
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
            return
        work()
        if self._enabled and shape not in self._graphs:
            self._graphs[shape] = self._record(shape, work)

    def _record(self, shape: StepShape, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """None, and a line in the log, where CUDA refuses, as it does when memory is short."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on to call CUDA: NCCL's do.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            _log.warning("steps of %d sequences run without a graph: %s", shape.seqs, reason)
            return None
        return graph
