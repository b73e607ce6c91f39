"""Shares cover everything once, leave nobody out, and keep to borders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.backends.parallel.layout import (
    Interval,
    divided,
    head_shares,
    joined,
    kv_heads_of,
    length,
    shares,
    wide_shares,
)

SIZES = st.integers(1, 300)
RANKS = st.integers(1, 9)


def check(found: list[Interval], size: int, grain: int, ranks: int) -> None:
    assert len(found) == ranks
    assert (found[0][0], found[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(start < end for start, end in found)
    assert all(start % grain == 0 for start, _ in found)


@given(SIZES, st.integers(1, 40), RANKS)
def test_shares_are_even_in_grains(size: int, grain: int, ranks: int) -> None:
    found = shares(size, grain, ranks)
    units = -(-size // grain)
    assert (found is None) == (units < ranks)
    if found:
        check(found, size, grain, ranks)
        counts = [-(-(end - start) // grain) for start, end in found]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("size", "grain", "ranks", "expected"),
    [
        (1536, 32, 2, [(0, 768), (768, 1536)]),
        (1536, 256, 4, [(0, 256), (256, 768), (768, 1024), (1024, 1536)]),
        (100, 1, 3, [(0, 32), (32, 64), (64, 100)]),  # the last has what no 32 divides
        (12, 1, 3, [(0, 4), (4, 8), (8, 12)]),  # too few for 32 each
        (512, 256, 3, None),
    ],
)
def test_wide_shares(size: int, grain: int, ranks: int, expected: list[Interval] | None) -> None:
    assert wide_shares(size, grain, ranks) == expected


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), RANKS)
def test_every_head_is_in_one_share_and_reads_its_own_kv_head(
    kv_heads: int, group: int, grain: int, ranks: int
) -> None:
    heads = kv_heads * group * grain
    found = head_shares(heads, kv_heads, grain, ranks)
    assert (found is None) == (heads // grain < ranks)
    for start, end in found or []:
        local = kv_heads_of((start, end), heads, kv_heads)
        for head in range(start, end):
            at = (head - start) * len(local) // (end - start)
            assert local[at] == head * kv_heads // heads
    if found:
        check(found, heads, grain, ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected", "kv"),
    [
        (32, 8, 4, [8, 8, 8, 8], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (9, 3, 2, [3, 6], [[0], [1, 2]]),  # whole groups, even though uneven
        (8, 2, 4, [2, 2, 2, 2], [[0], [0], [1], [1]]),
        (9, 3, 4, [3, 3, 1, 2], [[0], [1], [2], [2]]),
        (6, 1, 4, [1, 2, 1, 2], [[0], [0], [0], [0]]),
    ],
)
def test_shares_of_heads(
    heads: int, kv_heads: int, ranks: int, expected: list[int], kv: list[list[int]]
) -> None:
    found = head_shares(heads, kv_heads, 1, ranks) or []
    assert [end - start for start, end in found] == expected
    assert [kv_heads_of(share, heads, kv_heads) for share in found] == kv


def test_kv_heads_are_repeated_where_a_group_is_cut() -> None:
    """Four blocks of two heads each, three heads to a KV head."""
    assert head_shares(6, 2, 2, 3) == [(0, 2), (2, 4), (4, 6)]
    assert kv_heads_of((0, 2), 6, 2) == [0]
    assert kv_heads_of((2, 4), 6, 2) == [0, 1]
    assert kv_heads_of((1, 6), 6, 2) == [0, 0, 1, 1, 1]


@given(st.lists(st.tuples(SIZES, SIZES).map(sorted).map(tuple)), st.lists(st.integers(0, 60)))
def test_intervals_of_parts_side_by_side(intervals: list[Interval], widths: list[int]) -> None:
    starts = [sum(widths[:i]) for i in range(len(widths))]
    found = [
        column + starts[part]
        for part, (start, end) in divided(intervals, widths)
        for column in range(start, end)
    ]
    expected = [c for start, end in intervals for c in range(start, end) if c < sum(widths)]
    assert found == expected


@given(st.lists(st.tuples(SIZES, SIZES).map(sorted).map(tuple)))
def test_joined_intervals_are_the_same_columns(intervals: list[Interval]) -> None:
    found = joined(intervals)
    assert [c for a, b in found for c in range(a, b)] == [
        c for a, b in intervals for c in range(a, b)
    ]
    assert length(found) == length(intervals)
