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
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MOST_RANKS = 2**16
_MOST_PORTS = 2**16


@dataclass(frozen=True)
class Torchrun:
    """`address` and `port` are those of the store, where ranks meet: rank 0 makes it, unless
    `has_store`: then torchrun has it already."""

    rank: int
    world_size: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    has_store: bool = False

    @classmethod
    def find(cls, config: EngineConfig, variables: Mapping[str, str] = os.environ) -> Self | None:
        """None where localllm starts the ranks itself, or there is one alone.

        RequestError where there are more or fewer ranks than the model is divided among, or a
        variable makes no sense.
        """
        if not all(name in variables for name in _NEEDED):
            return None
        world_size = _number(variables, "WORLD_SIZE", 1, _MOST_RANKS)
        if world_size != config.ranks:
            raise RequestError(
                f"torchrun started {world_size} ranks; tensor_parallel_size "
                f"{config.tensor_parallel_size} times pipeline_parallel_size "
                f"{config.pipeline_parallel_size} is {config.ranks}",
                param="tensor_parallel_size",
            )
        if world_size == 1:
            return None
        return cls(
            rank=_number(variables, "RANK", 0, world_size),
            world_size=world_size,
            local_rank=_number(variables, "LOCAL_RANK", 0, world_size),
            local_ranks=_number(
                {"LOCAL_WORLD_SIZE": "1", **variables}, "LOCAL_WORLD_SIZE", 1, world_size + 1
            ),
            address=variables["MASTER_ADDR"],
            port=_number(variables, "MASTER_PORT", 1, _MOST_PORTS),
            has_store=variables.get(_AGENTS_STORE) == str(True),
        )


def _number(variables: Mapping[str, str], name: str, least: int, end: int) -> int:
    text = variables[name]
    if not text.isdecimal() or not least <= int(text) < end:
        raise RequestError(
            f"the environment variable {name} is {text!r}, not a number of {least} to {end - 1}"
        )
    return int(text)
