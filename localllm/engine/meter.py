"""Histograms of the engine's steps since it started, for whoever watches it."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECOND_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Tally(NamedTuple):
    """`counts[i]` values were at most bound i and above the one before; the last above all."""

    counts: tuple[int, ...] = ()
    total: float = 0.0  # of the values


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def tally(self) -> Tally:
        return Tally(tuple(self._counts), self._total)


class StepMeter:
    """What steps took: tokens, and seconds in each of their phases."""

    def __init__(self) -> None:
        self._tokens = Histogram(TOKEN_BOUNDS)
        self._seconds = {name: Histogram(SECOND_BOUNDS) for name in ("schedule", "run", "update")}

    def add(self, tokens: int, schedule: float, run: float, update: float) -> None:
        self._tokens.add(tokens)
        self._seconds["schedule"].add(schedule)
        self._seconds["run"].add(run)
        self._seconds["update"].add(update)

    @property
    def tokens(self) -> Tally:
        return self._tokens.tally()

    @property
    def seconds(self) -> tuple[tuple[str, Tally], ...]:
        return tuple((name, histogram.tally()) for name, histogram in self._seconds.items())
