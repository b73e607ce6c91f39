"""What a step does, before it has memory: kernel calls, the buffers they use, and their order.

A plan collects calls in program order. `finish` gives every buffer its place in one workspace
(buffers that are never alive together share memory) and finds for every call the last one that
has to be finished before it, from the memory that both touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localllm.backends.cpu.kernel import Kernel
from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.memory import round_up


@dataclass(eq=False)
class Buffer:
    """A piece of the workspace. `address` is valid once the plan is bound to memory.

    A buffer of no bytes stands for memory elsewhere that calls have to take turns on.
    """

    n_bytes: int
    offset: int = -1
    address: int = 0


@dataclass(frozen=True)
class Region:
    """Columns first..end of a buffer's rows (or of whatever the users of the buffer number)."""

    buffer: Buffer
    first: int
    end: int


def whole(buffer: Buffer) -> Region:
    return Region(buffer, 0, 1 << 62)


@dataclass(frozen=True, eq=False)
class Call:
    """`arguments` is asked for once the buffers have addresses."""

    op: int  # index in the program; its length for what comes after the ops
    kernel: Kernel
    arguments: Callable[[], Arguments]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    work: int = 0  # elements to compute for each token, if simply that is its work
    callees: tuple[Kernel, ...] = ()  # kernels that this one calls by their addresses


@dataclass
class Plan:
    calls: list[Call] = field(default_factory=list)
    lasting: list[Buffer] = field(default_factory=list)  # share their memory with no other
    workspace_bytes: int = 0
    needs: list[int] = field(default_factory=list)  # per call; -1: nothing

    def add(
        self,
        op: int,
        kernel: Kernel,
        arguments: Callable[[], Arguments],
        reads: Sequence[Region],
        writes: Sequence[Region],
        work: int = 0,
        callees: Sequence[Kernel] = (),
    ) -> None:
        call = Call(op, kernel, arguments, tuple(reads), tuple(writes), work, tuple(callees))
        self.calls.append(call)

    def finish(self) -> None:
        self.workspace_bytes = _lay_out(self._lifetimes())
        self.needs = _dependencies(self.calls)

    def bind(self, base: int) -> None:
        """Gives the buffers their addresses in a workspace at `base`, aligned to 64 bytes."""
        for buffer, _, _ in self._lifetimes():
            buffer.address = base + buffer.offset

    def kernels(self) -> list[Kernel]:
        """Each kernel once, in order of first use."""
        return list(dict.fromkeys(k for call in self.calls for k in (call.kernel, *call.callees)))

    def _lifetimes(self) -> list[tuple[Buffer, int, int]]:
        """Each buffer with the first and the last call that uses it, by first call."""
        spans: dict[Buffer, tuple[int, int]] = {}
        for at, call in enumerate(self.calls):
            for region in (*call.reads, *call.writes):
                buffer = region.buffer
                first, _ = spans.get(buffer, (at, at))
                spans[buffer] = (first, at)
        spans.update((buffer, (0, len(self.calls))) for buffer in self.lasting)
        return [(buffer, *span) for buffer, span in spans.items() if buffer.n_bytes]


def _lay_out(lifetimes: list[tuple[Buffer, int, int]]) -> int:
    """Places each buffer at the lowest offset that no buffer alive at the time covers."""
    top = 0
    alive: list[tuple[int, int, int]] = []  # offset, end offset, last use
    for buffer, first, last in sorted(lifetimes, key=lambda lifetime: lifetime[1]):
        alive = [entry for entry in alive if entry[2] >= first]
        offset, size = 0, round_up(buffer.n_bytes)
        for start, end, _ in sorted(alive):
            if offset + size <= start:
                break
            offset = max(offset, end)
        buffer.offset = offset
        alive.append((offset, offset + size, last))
        top = max(top, offset + size)
    return top


def _dependencies(calls: Sequence[Call]) -> list[int]:
    needs: list[int] = []
    finished = -1  # what every thread has waited for when it comes to this call
    for at, call in enumerate(calls):
        last = next((i for i in range(at - 1, finished, -1) if _conflict(call, calls[i])), -1)
        needs.append(last)
        finished = max(finished, last)
    return needs


def _conflict(a: Call, b: Call) -> bool:
    return any(_overlap(x, y) for x in a.writes for y in (*b.reads, *b.writes)) or any(
        _overlap(x, y) for x in a.reads for y in b.writes
    )


def _overlap(a: Region, b: Region) -> bool:
    if a.buffer is b.buffer:
        return a.first < b.end and b.first < a.end
    if not a.buffer.n_bytes or not b.buffer.n_bytes:
        return False
    a_start, b_start = a.buffer.offset, b.buffer.offset
    return a_start < b_start + b.buffer.n_bytes and b_start < a_start + a.buffer.n_bytes
