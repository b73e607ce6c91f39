"""The memory of all ranks as if it were one device's.

What the engine plans for is divided evenly, so that the rank with the least decides: all memory is
so many times the least rank's, and what ranks take is so many times the largest part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.backends.base import MemoryInfo
from localllm.errors import InsufficientMemoryError


@dataclass(frozen=True)
class RankMemory:
    """`host` names the machine whose memory it is, and that of the other ranks there; None: the
    rank's own device's."""

    info: MemoryInfo
    host: str | None


def shares(found: Sequence[RankMemory]) -> list[MemoryInfo]:
    """What each rank may take if the others of its machine take as much."""
    there = Counter(memory.host for memory in found)
    result = []
    for memory in found:
        sharing = there[memory.host] if memory.host is not None else 1
        info = memory.info
        result.append(MemoryInfo(info.total // sharing, info.available // sharing, info.dedicated))
    return result


def all_memory(found: Sequence[RankMemory]) -> MemoryInfo:
    own = shares(found)
    return MemoryInfo(
        len(own) * min(info.total for info in own),
        len(own) * min(info.available for info in own),
        all(info.dedicated for info in own),
    )


def check_parts_fit(found: Sequence[RankMemory], parts: Sequence[int]) -> None:
    """Before weights of so many bytes a rank are loaded."""
    for rank, (info, size) in enumerate(zip(shares(found), parts, strict=True)):
        if size > info.available:
            raise InsufficientMemoryError(
                f"Rank {rank} needs {_megabytes(size)} for its part of the weights; "
                f"{_megabytes(info.available)} of {_megabytes(info.total)} are available to it"
            )


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.0f} MB" if n >= 10e6 else f"{n / 1e6:,.2f} MB"
