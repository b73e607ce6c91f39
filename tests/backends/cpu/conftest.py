"""Runs single kernels on numpy arrays, through the real tape and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from localllm.backends.cpu import tape
from localllm.backends.cpu.kernel import (
    H_LOGIT_ROW_IDS,
    H_LOGIT_ROWS,
    H_POSITIONS,
    H_THREADS,
    H_TOKENS,
    HEADER_WORDS,
    Kernel,
)
from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.memory import aligned_bytes
from localllm.backends.cpu.workers import Workers

RunKernel: TypeAlias = Callable[..., None]


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Workers]]:
    made = {threads: Workers(threads) for threads in (1, 2, 3)}
    yield made
    for workers in made.values():
        workers.close()


@pytest.fixture
def run_kernel(pools: dict[int, Workers]) -> RunKernel:
    """run_kernel(kernel, arguments, tokens=..., ...): one op on its own tape."""

    def run(
        kernel: Kernel,
        arguments: Arguments,
        *,
        tokens: int,
        positions: Any = None,
        logit_rows: Any = None,
        threads: int = 1,
    ) -> None:
        header = np.zeros(HEADER_WORDS, np.int64)
        header[H_TOKENS], header[H_THREADS] = tokens, threads
        if positions is not None:
            header[H_POSITIONS] = positions.ctypes.data
        if logit_rows is not None:
            header[H_LOGIT_ROWS] = len(logit_rows)
            header[H_LOGIT_ROW_IDS] = logit_rows.ctypes.data
        sync = aligned_bytes(tape.SYNC_BYTES)
        words = [header.ctypes.data, sync.ctypes.data, *arguments.words()]
        block = np.array(words, np.int64)
        table = np.array([[kernel.address, block.ctypes.data, -1, 0]], np.int64)
        workers = pools[threads]
        workers.start(table, sync, 0, 1, tokens)
        workers.join()
        workers.settle()

    return run
