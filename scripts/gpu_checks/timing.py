"""Time as the wall clock has it and as the device has it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_KERNELS = 12  # that are named


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, *, calls: int, tries: int) -> float:
    """Of one call when `calls` follow each other: the median of some tries, once warmed up."""
    work()
    times = []
    for _ in range(tries):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


@dataclass(frozen=True)
class KernelTime:
    """Of one call of the work: seconds in which some kernel ran, and the sum of each by name."""

    busy: float
    by_name: dict[str, float]


def kernel_time(work: Callable[[], object], device: str, calls: int) -> KernelTime:
    """By the device's own clock, through torch's profiler; copies and fills are no kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            work()
        wait_for(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in events
        if e.get("cat") == "kernel"
    ]
    sums: defaultdict[str, float] = defaultdict(float)
    for start, end, name in kernels:
        sums[name] += (end - start) / 1e6 / calls
    named = dict(sorted(sums.items(), key=lambda item: -item[1])[:MOST_KERNELS])
    return KernelTime(_union([(start, end) for start, end, _ in kernels]) / 1e6 / calls, named)


def _union(intervals: list[tuple[float, float]]) -> float:
    """The length that some interval covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
