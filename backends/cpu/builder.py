"""What the lowering of every op shares: operands, buffers, scratch memory, quantized panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.base import StepLimits
from localllm.backends.cpu.fusion import Fusions
from localllm.backends.cpu.kernel import ROWS_LOGITS, ROWS_TOKENS, Kernel
from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.kv_cache import KVCache
from localllm.backends.cpu.memory import round_up
from localllm.backends.cpu.plan import Buffer, Plan, Region
from localllm.backends.cpu.weights import Weights
from localllm.backends.program import Program, RopeTable, Rows, Value

FLOAT_BYTES = 4
_STRIDE_FLOATS = 16  # rows start at cache lines


@dataclass(frozen=True)
class Operand:
    """A matrix in the workspace: `width` columns from `offset` on, rows `stride` floats apart."""

    buffer: Buffer
    offset: int
    width: int
    stride: int
    rows: int  # row kind

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset * FLOAT_BYTES

    @property
    def region(self) -> Region:
        return Region(self.buffer, self.offset, self.offset + self.width)

    def columns(self, first: int, width: int) -> Operand:
        return Operand(self.buffer, self.offset + first, width, self.stride, self.rows)


class Builder:
    """Collects the plan of one program. The caches may be set later, before the plan is bound."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        limits: StepLimits,
        threads: int,
        fusions: Fusions,
    ) -> None:
        self.program, self.weights, self.fusions = program, weights, fusions
        self.limits, self.threads = limits, threads
        self.plan = Plan()
        self.caches: Sequence[KVCache] = ()
        self.scratch_bytes = 0  # per thread
        self.rope_tables: dict[RopeTable, Buffer] = {}
        self.panels: dict[tuple[Any, ...], Buffer] = {}
        self.cache_turns = [Buffer(0) for _ in program.kv_groups]
        self.attention_parts = self.lasting_buffer(0)
        self.maxima: Buffer | None = None  # of the logits, for sampling
        self._scratch = self.lasting_buffer(0)
        self._op = 0
        self._constants: list[npt.NDArray[Any]] = []
        self._values = [self.matrix(width, rows) for width, rows in program.buffers]

    def begin(self, op: int) -> None:
        """Calls that follow belong to this op of the program."""
        self._op = op

    def call(
        self,
        kernel: Kernel,
        arguments: Callable[[], Arguments],
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region],
        work: int = 0,
        callees: Sequence[Kernel] = (),
    ) -> None:
        """`work`: elements to compute for each token, for ops whose time that tells.

        `callees`: kernels that `kernel` calls.
        """
        self.plan.add(self._op, kernel, arguments, reads, writes, work, callees)

    def operand(self, value: Value) -> Operand:
        return self._values[value.buffer].columns(value.offset, value.width)

    def matrix(self, width: int, rows: Rows, per_row: int = 1) -> Operand:
        """A new matrix with room for the most rows, `per_row` for each row of the step."""
        stride = round_up(width, _STRIDE_FLOATS)
        buffer = Buffer(self.capacity(rows) * per_row * stride * FLOAT_BYTES)
        return Operand(buffer, 0, width, stride, row_kind(rows))

    def panel(self, value: Value) -> Buffer:
        """A new panel for the rows of an op that `fusions` has leave one."""
        form = self.fusions.panels[value].format
        panel = Buffer(form.bytes(self.capacity(value.rows), value.width))
        self.panels[value, form.name] = panel
        return panel

    def capacity(self, rows: Rows) -> int:
        return self.limits.logit_rows if rows == "R" else self.limits.tokens

    def lasting_buffer(self, n_bytes: int) -> Buffer:
        buffer = Buffer(n_bytes)
        self.plan.lasting.append(buffer)
        return buffer

    def need_scratch(self, n_bytes: int) -> None:
        """Makes sure that each thread has so much scratch memory."""
        self.scratch_bytes = max(self.scratch_bytes, round_up(n_bytes))
        self._scratch.n_bytes = self.scratch_bytes * self.threads

    @property
    def scratch_address(self) -> int:
        """Thread t's scratch memory starts `t * scratch_bytes` from here."""
        return self._scratch.address

    def constant(self, values: npt.NDArray[Any]) -> int:
        """The address of an array that lives as long as the step."""
        kept = np.ascontiguousarray(values)
        self._constants.append(kept)
        return int(kept.ctypes.data)


def row_kind(rows: Rows) -> int:
    return ROWS_LOGITS if rows == "R" else ROWS_TOKENS
