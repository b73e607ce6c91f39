from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from localllm.backends.cpu import cgroup
from localllm.backends.cpu.cores import default_threads
from localllm.backends.host_memory import memory_info

FOUR = frozenset(range(4))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_affinity_counts(tmp_path: Path) -> None:
    assert default_threads(tmp_path, FOUR).threads == 4
    assert default_threads(tmp_path, frozenset({3})).threads == 1


def test_one_thread_per_physical_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"
        write(tmp_path, **{topology: siblings})
    assert default_threads(tmp_path, frozenset(range(8))).threads == 4
    assert default_threads(tmp_path, frozenset({4, 5})).threads == 2


def test_efficiency_cores_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, **{"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-11"})
    choice = default_threads(tmp_path, frozenset(range(12)))
    assert (choice.threads, choice.why) == (4, "4 performance cores")
    assert default_threads(tmp_path, frozenset({8, 9})).threads == 2


def test_slow_cores_of_an_edge_board_are_left_out(tmp_path: Path) -> None:
    for cpu, capacity in enumerate([446, 446, 1024, 1024]):
        write(tmp_path, **{f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{capacity}\n"})
    assert default_threads(tmp_path, FOUR).threads == 2


@pytest.mark.parametrize(("quota", "threads"), [("150000", 1), ("300000", 3), ("max", 4)])
def test_quota_v2_of_the_group_or_one_above(tmp_path: Path, quota: str, threads: int) -> None:
    write(tmp_path, **{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"})
    write(tmp_path, **{"sys/fs/cgroup/a/cpu.max": f"{quota} 100000\n"})
    assert default_threads(tmp_path, FOUR).threads == threads


def test_quota_v1_in_a_container(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "3:cpu,cpuacct:/outside/only\n2:memory:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.cpu_quota(tmp_path) == 2.5
    assert default_threads(tmp_path, FOUR).why == "the control group allows 2.5 cores"


def test_memory_of_the_machine(tmp_path: Path) -> None:
    info = memory_info(tmp_path)
    assert info.total == psutil.virtual_memory().total
    assert 0 < info.available <= info.total


def test_memory_limit_of_the_group(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100000000",
            "sys/fs/cgroup/memory.current": "60000000",
            "sys/fs/cgroup/memory.stat": "active_file 5\ninactive_file 20000000\n",
        },
    )
    info = memory_info(tmp_path)
    assert (info.total, info.available) == (100_000_000, 60_000_000)


def test_no_memory_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "2:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        },
    )
    assert memory_info(tmp_path).total == psutil.virtual_memory().total
