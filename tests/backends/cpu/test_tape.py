"""The tape and its threads: every op once, in order, whatever else the machine does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.cpu import tape
from localllm.backends.cpu.kernel import arg_i64, claim, kernel
from localllm.backends.cpu.memory import aligned_bytes
from localllm.backends.cpu.simd import scalar_load_i64, scalar_store_i64
from localllm.backends.cpu.workers import Workers

OPS, ITEMS, TOKENS = 60, 64, 5


@kernel
def add_neighbours(args: int, tid: int, n: int) -> None:
    """out[i] = x[i] + x[i + 1]: wrong as soon as the op before is not finished."""
    x, out, items = arg_i64(args, 2), arg_i64(args, 3), arg_i64(args, 4)
    i = claim(args, 4)
    while i < items:
        for j in range(i, min(i + 4, items)):
            after = scalar_load_i64(x, (j + 1) % items * 8)
            scalar_store_i64(out, j * 8, scalar_load_i64(x, j * 8) + after)
        i = claim(args, 4)


@dataclass
class Chain:
    """Ops that each read what the one before wrote."""

    values: npt.NDArray[np.int64]
    table: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    sync: npt.NDArray[np.uint8]

    @classmethod
    def make(cls) -> Chain:
        values = np.zeros((OPS + 1, ITEMS), np.int64)
        sync = aligned_bytes(OPS * tape.SYNC_BYTES)
        blocks = np.zeros((OPS, 8), np.int64)
        blocks[:, 1] = sync.ctypes.data + tape.SYNC_BYTES * np.arange(OPS)
        blocks[:, 2] = [row.ctypes.data for row in values[:-1]]
        blocks[:, 3] = [row.ctypes.data for row in values[1:]]
        blocks[:, 4] = ITEMS
        table = np.zeros((OPS, tape.ROW_WORDS), np.int64)
        table[:, 0] = add_neighbours.address
        table[:, 1] = blocks.ctypes.data + blocks.strides[0] * np.arange(OPS)
        table[:, 2] = np.arange(-1, OPS - 1)
        table[1::3, 3] = TOKENS  # one op in three is for one thread alone
        return cls(values, table, blocks, sync)

    def run(self, workers: Workers, first: int = 0, end: int = OPS) -> None:
        workers.start(self.table, self.sync, first, end, TOKENS)
        workers.join()

    def set_input(self, seed: int) -> None:
        self.values[0] = np.random.default_rng(seed).integers(0, 1000, ITEMS)
        self.values[1:] = -1

    def expected(self) -> npt.NDArray[np.int64]:
        rows = [self.values[0]]
        for _ in range(OPS):
            rows.append(rows[-1] + np.roll(rows[-1], -1))
        return np.array(rows)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_op_sees_the_one_before(threads: int) -> None:
    workers, chain = Workers(threads), Chain.make()
    for seed in range(50):
        chain.set_input(seed)
        chain.run(workers)
        assert np.array_equal(chain.values, chain.expected())
    workers.close()


def test_a_part_of_the_tape_continues_where_another_ended() -> None:
    workers, chain = Workers(2), Chain.make()
    chain.set_input(0)
    for first, end in ((0, 10), (10, 10), (10, 11), (11, OPS)):
        chain.run(workers, first, end)
    assert np.array_equal(chain.values, chain.expected())
    workers.close()


def test_the_workers_do_it_alone_while_the_caller_is_away() -> None:
    workers, chain = Workers(2), Chain.make()
    chain.set_input(0)
    workers.start(chain.table, chain.sync, 0, OPS, TOKENS)
    workers.settle()  # the only other thread has walked to the end
    assert np.array_equal(chain.values, chain.expected())
    workers.join()
    workers.close()


@pytest.fixture
def burners() -> Iterator[None]:
    """More busy processes than this machine has cores for; they end even if the test is killed."""
    spin = [sys.executable, "-c", "import time\nwhile time.process_time() < 60: pass"]
    processes = [subprocess.Popen(spin) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("burners")
def test_steps_end_beside_busy_processes() -> None:
    workers, chain = Workers(3), Chain.make()
    for seed in range(100):
        chain.set_input(seed)
        chain.run(workers)
        assert np.array_equal(chain.values, chain.expected())
    workers.close()


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    workers, chain = Workers(3), Chain.make()
    assert set(threading.enumerate()) == before
    chain.run(workers)
    assert len(set(threading.enumerate()) - before) == 2
    workers.close()
    workers.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        chain.run(workers)


def test_idle_threads_use_no_time() -> None:
    """A worker waits in a system call; its clock stands still."""
    script = """
import resource, time
from tests.backends.cpu.test_tape import Chain
from localllm.backends.cpu.workers import Workers
workers, chain = Workers(4), Chain.make()
chain.run(workers)
time.sleep(0.1)
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(0.5)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert float(result.stdout) < 0.1


def test_stamps_tell_when_each_op_was_finished() -> None:
    workers, chain = Workers(2), Chain.make()
    chain.set_input(0)
    stamps = np.zeros(OPS, np.int64)
    workers.start(chain.table, chain.sync, 0, OPS, TOKENS, stamps)
    workers.join()
    assert stamps[0] > 0
    assert (np.diff(stamps) > 0).all()
    workers.close()
