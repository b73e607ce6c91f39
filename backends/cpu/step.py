"""A compiled program: one batch through the tape."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, StepLimits
from localllm.backends.cpu import batch
from localllm.backends.cpu import kernel as k
from localllm.backends.cpu.builder import FLOAT_BYTES, Operand
from localllm.backends.cpu.lower import Lowered
from localllm.backends.cpu.memory import aligned_bytes, round_up
from localllm.backends.cpu.plan import Call
from localllm.backends.cpu.tape import ROW_WORDS, SYNC_BYTES
from localllm.backends.cpu.workers import Workers
from localllm.backends.program import FloatArray

# Elements of an op that take one thread about as long as it takes two to agree on who does what.
_ALONE = 4096


class CpuStep:
    """Runs batches with the workers of a backend; see `backends.base.Step`.

    `submit` starts the other threads and returns; `collect` helps them until all is done. A batch
    with masks is sampled in `collect`, which its caller does not call before they are filled.
    """

    def __init__(
        self,
        lowered: Lowered,
        limits: StepLimits,
        workers: Workers,
        make_unfused: Callable[[], CpuStep] | None = None,
    ) -> None:
        """`make_unfused` makes a step of the same program in which no ops share a call."""
        self._lowered, self._limits, self._workers = lowered, limits, workers
        self._make_unfused = make_unfused
        self._unfused: CpuStep | None = None if make_unfused else self
        self._vocab = lowered.logits.width
        plan = lowered.builder.plan
        self._workspace = aligned_bytes(plan.workspace_bytes)
        plan.bind(int(self._workspace.ctypes.data))
        self._header = np.zeros(k.HEADER_WORDS, np.int64)
        self._header[k.H_THREADS] = workers.threads
        self._sync = aligned_bytes(SYNC_BYTES * len(plan.calls))
        self._blocks = self._argument_blocks()
        self._table = self._make_table()
        self._last_call = _last_calls(lowered)
        self._sampling_call = self._last_call[-1]
        self._arrays: object = None  # of the last batch, which the threads may read
        self._rows = 0
        self._submitted = 0  # calls of the table that `submit` has started

    def _argument_blocks(self) -> npt.NDArray[np.int64]:
        words = [call.arguments().words() for call in self._lowered.builder.plan.calls]
        width = round_up(2 + max(map(len, words)), k.CACHE_LINE // 8)
        blocks = np.zeros((len(words), width), np.int64)
        blocks[:, 0] = self._header.ctypes.data
        blocks[:, 1] = self._sync.ctypes.data + SYNC_BYTES * np.arange(len(words))
        for block, own in zip(blocks, words, strict=True):
            block[2 : 2 + len(own)] = own
        return blocks

    def _make_table(self) -> npt.NDArray[np.int64]:
        plan = self._lowered.builder.plan
        table = np.zeros((len(plan.calls), ROW_WORDS), np.int64)
        table[:, 0] = [call.kernel.address for call in plan.calls]
        table[:, 1] = self._blocks.ctypes.data + self._blocks.strides[0] * np.arange(len(table))
        table[:, 2] = plan.needs
        table[:, 3] = [_ALONE // call.work if call.work else 0 for call in plan.calls]
        return table

    def warmup(self) -> None:
        groups = len(self._lowered.builder.caches)
        for tokens in (min(BLOCK_TOKENS, self._limits.tokens), 1):
            self.submit(Batch.first_tokens(tokens, groups))
            self.collect()

    def submit(self, batch: Batch) -> None:
        self._prepare(batch)
        self._submitted = self._sampling_call if batch.sampling.masks.size else len(self._table)
        self._workers.start(self._table, self._sync, 0, self._submitted, batch.ids.size)

    def collect(self) -> Int32Array:
        self._workers.join()
        if self._submitted < len(self._table):
            end, self._submitted = len(self._table), len(self._table)
            self._workers.start(self._table, self._sync, self._sampling_call, end, self._rows)
            self._workers.join()
        at = self._lowered.tokens.offset
        return self._workspace[at : at + 4 * self._rows].view(np.int32).copy()

    def logits(self) -> FloatArray:
        return self._view(self._lowered.logits, self._rows)

    def trace(self, batch: Batch) -> list[FloatArray]:
        """Op by op, so without fusions: a kernel of two ops has no output of the first."""
        if self._unfused is None:
            assert self._make_unfused is not None
            self._unfused = self._make_unfused()
        return self._unfused._trace(batch)

    def _trace(self, batch: Batch) -> list[FloatArray]:
        self._prepare(batch)
        results, first = [], 0
        for output, last in zip(self._lowered.outputs, self._last_call, strict=True):
            self._workers.start(self._table, self._sync, first, last, batch.ids.size)
            self._workers.join()
            rows = self._rows if output.rows == k.ROWS_LOGITS else batch.ids.size
            results.append(self._view(output, rows).copy())
            first = last
        return results

    def profile(self, batch: Batch) -> list[tuple[Call, int]]:
        """Runs the batch one call at a time; returns the calls and their nanoseconds."""
        self._prepare(batch)
        in_turn = self._table.copy()
        in_turn[:, 2] = np.arange(-1, len(in_turn) - 1)
        stamps = np.zeros(len(in_turn), np.int64)
        begin = time.perf_counter_ns()
        self._workers.start(in_turn, self._sync, 0, len(in_turn), batch.ids.size, stamps)
        self._workers.join()
        calls = self._lowered.builder.plan.calls
        return list(zip(calls, np.diff(stamps, prepend=begin).tolist(), strict=True))

    def _view(self, operand: Operand, rows: int) -> FloatArray:
        start = operand.buffer.offset
        matrix = self._workspace[start : start + rows * operand.stride * FLOAT_BYTES]
        floats = matrix.view(np.float32).reshape(rows, operand.stride)
        return floats[:, operand.offset : operand.offset + operand.width]

    def _prepare(self, data: Batch) -> None:
        """Points the step's header at the batch's arrays."""
        self._workers.settle()  # a late thread may still look at the last batch
        caches = self._lowered.builder.caches
        blocks = [cache.n_blocks for cache in caches]
        self._arrays = batch.fill_header(self._header, data, self._limits, self._vocab, blocks)
        self._rows = data.logit_rows.size


def _last_calls(lowered: Lowered) -> list[int]:
    """For each op of the program, the number of calls up to its end."""
    calls = lowered.builder.plan.calls
    return [bisect_right(calls, op, key=lambda call: call.op) for op in range(len(lowered.outputs))]
