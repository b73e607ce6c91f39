"""Who has which columns: arithmetic of shares.

An interval is (start, end). Shares are one interval for each rank, in rank order, none empty, that
together cover everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import lcm
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]

_WIDE = 32  # columns or rows that kernels like to have together


def shares(size: int, grain: int, ranks: int) -> list[Interval] | None:
    """Borders at multiples of `grain`, of which the last may be cut short; None: too few."""
    units = -(-size // grain)
    if units < ranks:
        return None
    borders = [min(size, rank * units // ranks * grain) for rank in range(ranks + 1)]
    return list(pairwise(borders))


def wide_shares(size: int, grain: int, ranks: int) -> list[Interval] | None:
    """The same, at multiples of what kernels like where there are enough of these."""
    return shares(size, lcm(grain, _WIDE), ranks) or shares(size, grain, ranks)


def head_shares(heads: int, kv_heads: int, grain: int, ranks: int) -> list[Interval] | None:
    """Query heads at multiples of `grain`, so that as few KV heads as can be are in two shares."""
    group = heads // kv_heads
    if kv_heads >= ranks and (aligned := shares(heads, lcm(group, grain), ranks)):
        return aligned
    if kv_heads < ranks and group % grain == 0 and group // grain * kv_heads >= ranks:
        return _shares_of_groups(group, kv_heads, grain, ranks)
    return shares(heads, grain, ranks)


def _shares_of_groups(group: int, kv_heads: int, grain: int, ranks: int) -> list[Interval]:
    """More ranks than KV heads: each reads one of them."""
    found: list[Interval] = []
    for kv_head in range(kv_heads):
        count = (kv_head + 1) * ranks // kv_heads - kv_head * ranks // kv_heads
        for start, end in shares(group, grain, count) or []:
            found.append((kv_head * group + start, kv_head * group + end))
    return found


def kv_heads_of(share: Interval, heads: int, kv_heads: int) -> list[int]:
    """The KV heads that a share of the query heads reads, repeated until all serve equally many.

    Local query head h reads entry `h * len(result) // (number of local heads)`.
    """
    group = heads // kv_heads
    read = [head // group for head in range(*share)]
    run = next(
        run
        for run in range(len(read), 0, -1)
        if len(read) % run == 0
        and all(len(set(read[at : at + run])) == 1 for at in range(0, len(read), run))
    )
    return read[::run]


def joined(intervals: Iterable[Interval]) -> Intervals:
    """Without empty ones; one where one goes on where the last has ended."""
    out: list[Interval] = []
    for start, end in intervals:
        if start == end:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return tuple(out)


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def scaled(intervals: Iterable[Interval], factor: int) -> Intervals:
    return tuple((start * factor, end * factor) for start, end in intervals)


def shifted(intervals: Iterable[Interval], by: int) -> Intervals:
    return tuple((start + by, end + by) for start, end in intervals)


def divided(intervals: Iterable[Interval], widths: Sequence[int]) -> list[tuple[int, Interval]]:
    """Intervals of parts put side by side as (number of the part, interval within it)."""
    out: list[tuple[int, Interval]] = []
    for start, end in intervals:
        first = 0
        for part, width in enumerate(widths):
            low, high = max(start, first), min(end, first + width)
            if low < high:
                out.append((part, (low - first, high - first)))
            first += width
    return out
