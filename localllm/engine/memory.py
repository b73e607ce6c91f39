"""How much memory the KV cache gets, and how its groups share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS, MemoryInfo
from localllm.engine.kv_manager import most_blocks
from localllm.errors import InsufficientMemoryError

SMALLEST_CONTEXT = 256  # tokens; with less than this a model is of no use
_SMALLEST_RESERVE = 128 * 2**20
_LARGEST_RESERVE = 2**30


@dataclass(frozen=True)
class KVNeeds:
    """What decides the size of a KV cache; per group its window and the bytes of one block.

    `context` is the wish for one request, `least_context` what there has to be.
    """

    windows: Sequence[int | None]
    block_bytes: Sequence[int]
    context: int
    least_context: int
    seqs: int
    chunk: int  # most tokens of one step

    def blocks(self, context: int) -> list[int]:
        """Per group, what one sequence of that length holds at most."""
        return [most_blocks(w, context, self.chunk, BLOCK_TOKENS) for w in self.windows]

    def bytes(self, n_blocks: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(n_blocks, self.block_bytes, strict=True))


@dataclass(frozen=True)
class KVPlan:
    """`keep_cached` is the size up to which the prefix cache may grow into untouched memory."""

    context: int
    n_blocks: tuple[int, ...]
    keep_cached: tuple[int, ...]
    bytes: int


def plan_kv(needs: KVNeeds, budget: int, *, whole: bool) -> KVPlan:
    """The largest cache of at most `budget` bytes that `needs.seqs` sequences can use.

    One sequence of the plan's context always fits alone. Groups hold the same number of tokens,
    save that a window group stops at what all sequences can see. Of a cache that is not meant to be
    filled as a `whole`, the prefix cache keeps a quarter. Raises InsufficientMemoryError.
    """
    if needs.bytes(needs.blocks(needs.least_context)) > budget:
        raise InsufficientMemoryError(
            f"A context of {needs.least_context} tokens needs "
            f"{megabytes(needs.bytes(needs.blocks(needs.least_context)))} of KV cache; "
            f"{megabytes(budget)} are left for it"
        )
    context = _largest(
        needs.least_context, needs.context, lambda n: needs.bytes(needs.blocks(n)) <= budget
    )
    one = needs.blocks(context)

    def blocks_for(tokens: int) -> list[int]:
        wanted = -(-tokens // BLOCK_TOKENS)
        return [max(n, min(wanted, needs.seqs * n)) for n in one]

    tokens = _largest(0, needs.seqs * context, lambda n: needs.bytes(blocks_for(n)) <= budget)
    n_blocks = blocks_for(tokens)
    keep = max(n_blocks) if whole else max(n_blocks) // 4
    return KVPlan(
        context, tuple(n_blocks), tuple(min(n, keep) for n in n_blocks), needs.bytes(n_blocks)
    )


def kv_budget(
    memory: MemoryInfo, workspace: int, asked: int | None, utilization: float = 1.0
) -> int:
    """Bytes for the KV cache, with the weights in memory and `workspace` bytes still to come.

    Without a wish: half of what is then available, less a reserve for the rest of the machine
    (which shrinks where there is hardly more than that). Of a device's own memory: all, but for
    what `utilization`, a share of the total, leaves free. A wish or a workspace that does not fit
    raises InsufficientMemoryError.
    """
    free = int(memory.total * (1 - utilization)) if memory.dedicated else 0
    left = memory.available - free - workspace
    if left < 0:
        raise InsufficientMemoryError(
            f"The buffers of a step need {megabytes(workspace)}; "
            f"{megabytes(max(0, memory.available - free))} of {megabytes(memory.total)} are "
            "available beside the weights. They take less with a smaller max_num_batched_tokens "
            "or max_num_seqs"
        )
    if asked is None and memory.dedicated:
        return left
    if asked is None:
        reserve = min(max(memory.total // 16, _SMALLEST_RESERVE), _LARGEST_RESERVE)
        return (left - min(reserve, left // 2)) // 2
    if asked > left:
        raise InsufficientMemoryError(
            f"A KV cache of {megabytes(asked)} does not fit: {megabytes(left)} of "
            f"{megabytes(memory.total)} are available beside weights and buffers"
        )
    return asked


def check_weights_fit(memory: MemoryInfo, weights: int) -> None:
    """Before they are loaded, so that the machine is not driven into swapping."""
    if weights > memory.available:
        raise InsufficientMemoryError(
            f"The model needs {megabytes(weights)} for its weights; "
            f"{megabytes(memory.available)} of {megabytes(memory.total)} are available"
        )


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.0f} MB" if n >= 10e6 else f"{n / 1e6:,.2f} MB"


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest n in low..high that fits, given that low does and that fitting is monotonic."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
