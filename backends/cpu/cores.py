"""How many threads are worth starting: one for each core that is really ours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from localllm.backends.cpu import cgroup

_CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True)
class ThreadChoice:
    threads: int
    why: str


def default_threads(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> ThreadChoice:
    """One thread per physical performance core that this process may use.

    A second thread on a core only competes for its vector units, and efficiency cores would be
    waited for at the end of each operation.
    """
    logical = affinity or _affinity()
    cores, kind = _performance_cores(root, logical)
    cores = _one_per_core(root, cores)
    quota = cgroup.cpu_quota(root)
    if quota is not None and quota < len(cores):
        return ThreadChoice(max(1, int(quota)), f"the control group allows {quota:g} cores")
    noun = f"{kind} core" if kind else "core"
    return ThreadChoice(len(cores), f"{len(cores)} {noun}{'s' if len(cores) > 1 else ''}")


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _performance_cores(root: Path, logical: frozenset[int]) -> tuple[frozenset[int], str]:
    """Those of `logical` that are fast ones, and their name when there are others."""
    intel = _cpu_list(root / "sys/devices/cpu_core/cpus") & logical
    if intel and intel != logical:
        return intel, "performance"
    capacity = {cpu: _capacity(root, cpu) for cpu in logical}
    best = max(capacity.values())
    fast = frozenset(cpu for cpu, value in capacity.items() if value * 2 > best)
    return (fast, "performance") if fast != logical else (logical, "")


def _one_per_core(root: Path, logical: frozenset[int]) -> frozenset[int]:
    """Of each physical core the first of its threads."""
    firsts = set()
    for cpu in logical:
        topology = root / _CPUS / f"cpu{cpu}" / "topology"
        siblings = _cpu_list(topology / "core_cpus_list") or _cpu_list(
            topology / "thread_siblings_list"
        )
        firsts.add(min((siblings & logical) | {cpu}))
    return frozenset(firsts)


def _capacity(root: Path, cpu: int) -> int:
    try:
        return int((root / _CPUS / f"cpu{cpu}" / "cpu_capacity").read_text())
    except (OSError, ValueError):
        return 1


def _cpu_list(path: Path) -> frozenset[int]:
    """A list in sysfs's notation, such as 0-3,8."""
    try:
        text = path.read_text().strip()
    except OSError:
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
