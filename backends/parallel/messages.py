"""What rank 0 tells the other ranks, and what they answer.

Every message but Run and Stop is answered, by Done, or by Failed from a rank that then ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import localllm.errors
from localllm.backends.base import StepLimits
from localllm.backends.parallel.ranks import Ranks
from localllm.backends.parallel.shard import Piece
from localllm.backends.program import Program
from localllm.config import EngineConfig
from localllm.errors import EngineError, InsufficientMemoryError, LocalLLMError, RequestError


@dataclass(frozen=True)
class Setup:
    """The first message. `store_port` is where the ranks of this machine meet; None: as torchrun's
    variables say. `fingerprint` is that of rank 0's file."""

    config: EngineConfig
    fingerprint: str
    device: str  # its kind: cpu or cuda
    ranks: Ranks
    rank: int
    store_port: int | None


@dataclass(frozen=True)
class Hello:
    """The answer to Setup, inside Done."""

    pid: int
    host: str


@dataclass(frozen=True)
class Join:
    """All ranks meet: each waits until the others are there."""


@dataclass(frozen=True)
class TellMemory:
    """Answered by a MemoryInfo."""


@dataclass(frozen=True)
class Load:
    piece: Piece


@dataclass(frozen=True)
class TellWorkspace:
    """Answered by what a step of the loaded piece takes in bytes; all ranks may run it for that."""

    limits: StepLimits


@dataclass(frozen=True)
class Compile:
    """With `n_blocks` in each KV group; they are allocated with it."""

    program: Program
    n_blocks: tuple[int, ...]
    limits: StepLimits


@dataclass(frozen=True)
class WarmUp:
    """All ranks run the same first batches."""


@dataclass(frozen=True)
class Run:
    plan: bytes  # see `wire`


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Done:
    value: Any = None


@dataclass(frozen=True)
class Failed:
    """`kind` is the class name of a LocalLLMError."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        match error:
            case LocalLLMError():
                return cls(type(error).__name__, str(error))
            case MemoryError():
                return cls(InsufficientMemoryError.__name__, f"out of memory: {error}")
        return cls(EngineError.__name__, f"{type(error).__name__}: {error}")

    def exception(self, who: str) -> LocalLLMError:
        """What was raised there, to be raised here."""
        kind = getattr(localllm.errors, self.kind, EngineError)
        if kind in (EngineError, RequestError) or issubclass(kind, localllm.errors.ModelError):
            error: LocalLLMError = kind(f"{who}: {self.message}")
            return error
        return EngineError(f"{who}: {self.message}")


Order: TypeAlias = Setup | Join | TellMemory | Load | TellWorkspace | Compile | WarmUp | Run | Stop
Answer: TypeAlias = Done | Failed
