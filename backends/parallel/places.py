"""What one rank computes with."""

from __future__ import annotations

from typing import cast

import torch

from localllm.backends.cpu.cores import default_threads
from localllm.backends.parallel.stage import RankBackend
from localllm.backends.selection import torch_backend
from localllm.config import EngineConfig


def make_backend(
    config: EngineConfig, device: str, local_rank: int, local_ranks: int
) -> RankBackend:
    """One rank's own. The ranks of a machine share its threads, and have a GPU each."""
    threads = config.threads or default_threads().threads
    index = local_rank if device == "cuda" else None
    backend = torch_backend(config, device, index=index, threads=max(1, threads // local_ranks))
    return cast(RankBackend, backend)


def device_of(kind: str, local_rank: int) -> torch.device:
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
