"""Ranks that torchrun, or somebody by hand, starts on one machine or several.

Each is the same command with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its
environment, which are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from localllm.config import EngineConfig
from localllm.errors import RequestError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Torchrun:
    rank: int
    world_size: int
    local_rank: int
    local_ranks: int
    address: str  # of rank 0's machine

    @classmethod
    def find(cls, config: EngineConfig, variables: Mapping[str, str] = os.environ) -> Self | None:
        """None where localllm starts the ranks itself, or there is one alone.

        RequestError where there are more or fewer ranks than the model is divided among.
        """
        if not all(name in variables for name in _NEEDED):
            return None
        try:
            found = cls(
                rank=int(variables["RANK"]),
                world_size=int(variables["WORLD_SIZE"]),
                local_rank=int(variables["LOCAL_RANK"]),
                local_ranks=int(variables.get("LOCAL_WORLD_SIZE", "1")),
                address=variables["MASTER_ADDR"],
            )
        except ValueError as error:
            raise RequestError(f"torchrun's variables in the environment: {error}") from error
        if found.world_size != config.ranks:
            raise RequestError(
                f"torchrun started {found.world_size} ranks; tensor_parallel_size "
                f"{config.tensor_parallel_size} times pipeline_parallel_size "
                f"{config.pipeline_parallel_size} is {config.ranks}",
                param="tensor_parallel_size",
            )
        return found if found.world_size > 1 else None
