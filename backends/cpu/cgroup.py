"""Limits that Linux control groups, versions 1 and 2, set on this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores' worth of time the process may use, if that is limited."""
    quotas = [
        *(_quota_v2(directory) for directory in _directories(root, "")),
        *(_quota_v1(directory) for directory in _directories(root, "cpu")),
    ]
    return min((q for q in quotas if q is not None), default=None)


def memory(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each group that has a limit; file cache does not count as used."""
    for directory in _directories(root, ""):
        yield from _memory_limit(directory, "memory.max", "memory.current", "inactive_file")
    for directory in _directories(root, "memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _memory_limit(directory, *names)


def _directories(root: Path, controller: str) -> Iterator[Path]:
    """The process's group of a controller ("" for version 2) and those above it.

    In a container the path may name a place outside its view; the mount itself is then its group.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3 or controller not in fields[1].split(","):
            continue
        mount = mounts if controller == "" else mounts / fields[1]
        if not mount.is_dir():
            mount = mounts / controller
        directory = mount / fields[2].lstrip("/")
        while True:
            if directory.is_dir():
                yield directory
            if directory == mount:
                break
            directory = directory.parent


def _quota_v2(directory: Path) -> float | None:
    fields = _read(directory / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(directory: Path) -> float | None:
    quota = _number(directory / "cpu.cfs_quota_us")
    period = _number(directory / "cpu.cfs_period_us")
    if not quota or not period or quota < 0:
        return None
    return quota / period


def _memory_limit(directory: Path, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    most, now = _number(directory / limit), _number(directory / used)
    if most is None or now is None:
        return
    for line in _read(directory / "memory.stat").splitlines():
        name, _, count = line.partition(" ")
        if name == cached:
            now -= int(count)
    yield most, max(0, now)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
