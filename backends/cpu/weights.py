"""Weights in memory: read from the mapped file piece by piece and packed for the kernels."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from localllm.backends.base import ProgressFn
from localllm.backends.cpu.kernel import Kernel
from localllm.backends.cpu.matmul import FORMATS, WeightFormat, convert, storage_type
from localllm.backends.cpu.memory import ByteArray, aligned_bytes, round_up
from localllm.backends.program import FloatArray, Program
from localllm.errors import GGUFError
from localllm.gguf import Tensor, TensorType

ROW_BLOCK = 8  # rows that a packed layout interleaves
_SLAB_BYTES = 16 << 20  # of the file, read and dropped at once
_CONVERTED_SLAB_BYTES = 1 << 20  # becomes many times as much on its way through float32
_PROGRESS_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix, or `experts` of them (0: just one), each `expert_bytes` long."""

    format: WeightFormat
    address: int
    rows: int
    cols: int
    experts: int
    expert_bytes: int

    def joined(self, other: Matrix) -> Matrix | None:
        """Both as one matrix, this one's rows first, if they lie so in memory."""
        if self.experts or other.experts or (self.format, self.cols) != (other.format, other.cols):
            return None
        own_bytes = self.format.packed_bytes(self.rows, self.cols)
        if self.rows % ROW_BLOCK or other.address != self.address + own_bytes:
            return None
        both = self.rows + other.rows
        return replace(self, rows=both, expert_bytes=own_bytes + other.expert_bytes)


class Weights:
    """A program's weights. Addresses hold from the start, the values follow with `pack`."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        names, vectors = program.weights(), program.vectors()
        for name in names:
            if name not in tensors:
                raise GGUFError(f"tensor {name!r} is missing")
        self._vectors = {name: _read_vector(tensors[name]) for name in names if name in vectors}
        self._plans = [_MatrixPlan(tensors[name]) for name in names if name not in vectors]
        self._arena = aligned_bytes(sum(plan.n_bytes for plan in self._plans), huge_pages=True)
        self.n_bytes = self._arena.nbytes + sum(v.nbytes for v in self._vectors.values())
        self.matrices: dict[str, Matrix] = {}
        address = int(self._arena.ctypes.data)
        for plan in self._plans:
            self.matrices[plan.tensor.name] = plan.matrix(address)
            address += plan.n_bytes

    def vector(self, name: str | None) -> tuple[int, int]:
        """Address and length of a float32 vector; zeros for None."""
        if name is None:
            return 0, 0
        values = self._vectors[name]
        return int(values.ctypes.data), values.size

    def pack_kernels(self) -> list[Kernel]:
        return list(dict.fromkeys(plan.format.pack_kernel for plan in self._plans))

    def pack(self, threads: int, progress: ProgressFn) -> None:
        """Fills the matrices from the file, whose pages are dropped on the way."""
        _report_conversions(self._plans, progress)
        offset, meter = 0, _Meter(progress, sum(plan.tensor.n_bytes for plan in self._plans))
        with ThreadPoolExecutor(threads, "localllm-load") as pool:
            for plan in self._plans:
                plan.pack(self._arena[offset : offset + plan.n_bytes], pool, threads)
                offset += plan.n_bytes
                meter.advance(plan.tensor.n_bytes)


def _read_vector(tensor: Tensor) -> FloatArray:
    values = np.array(tensor.dequantize(), np.float32).ravel()
    tensor.drop_pages()
    return values


class _MatrixPlan:
    """How one tensor becomes packed matrices."""

    def __init__(self, tensor: Tensor) -> None:
        if len(tensor.shape) not in (2, 3):
            raise GGUFError(f"tensor {tensor.name!r} has shape {tensor.shape}, not a matrix's")
        self.tensor = tensor
        self.stored_as = storage_type(tensor.type)
        self.format = FORMATS[self.stored_as]
        self.rows, self.cols = tensor.shape[-2:]
        self.experts = tensor.shape[0] if len(tensor.shape) == 3 else 0
        self.expert_bytes = round_up(self.format.packed_bytes(self.rows, self.cols))
        self.n_bytes = max(1, self.experts) * self.expert_bytes

    def matrix(self, address: int) -> Matrix:
        return Matrix(self.format, address, self.rows, self.cols, self.experts, self.expert_bytes)

    def pack(self, out: ByteArray, pool: ThreadPoolExecutor, threads: int) -> None:
        raw = self.tensor.raw()
        converted = self.stored_as != self.tensor.type
        slab_bytes = _CONVERTED_SLAB_BYTES * threads if converted else _SLAB_BYTES
        slab_rows = max(1, slab_bytes // (raw.shape[1] * ROW_BLOCK)) * ROW_BLOCK
        pending = 0
        for expert in range(max(1, self.experts)):
            packed = out[expert * self.expert_bytes : (expert + 1) * self.expert_bytes]
            for first in range(0, self.rows, slab_rows):
                last = min(first + slab_rows, self.rows)
                source = raw[expert * self.rows + first : expert * self.rows + last]
                target = packed[self.format.packed_bytes(first, self.cols) :]
                self._pack_slab(source, target, pool, threads)
                pending += source.nbytes
                if pending >= _SLAB_BYTES:
                    self.tensor.drop_pages()
                    pending = 0
        self.tensor.drop_pages()

    def _pack_slab(
        self, source: ByteArray, out: ByteArray, pool: ThreadPoolExecutor, threads: int
    ) -> None:
        """Packs rows that start at a block boundary, every thread some of the blocks."""
        blocks = -(-source.shape[0] // ROW_BLOCK)
        bounds = [blocks * i // threads for i in range(threads + 1)]

        def pack(first: int, last: int) -> None:
            part = source[first * ROW_BLOCK : last * ROW_BLOCK]
            if self.stored_as != self.tensor.type:
                part = _convert(part, self.tensor, self.stored_as)
            to = out[self.format.packed_bytes(first * ROW_BLOCK, self.cols) :]
            self.format.pack(part, part.shape[0], self.cols, to, 0, last - first)

        list(pool.map(pack, bounds[:-1], bounds[1:]))


def _convert(source: ByteArray, tensor: Tensor, target: TensorType) -> ByteArray:
    """Rows of a format without kernels in one that has them."""
    from gguf import GGMLQuantizationType, quants  # slow to import, and seldom needed

    try:
        with np.errstate(all="ignore"):  # damaged weights may hold infinities and NaN
            values = quants.dequantize(source, GGMLQuantizationType(tensor.type))
            return convert(values, target)
    except (NotImplementedError, ValueError) as error:
        name = tensor.type.name
        raise GGUFError(f"tensor {tensor.name!r}: cannot convert {name}") from error


def _report_conversions(plans: Iterable[_MatrixPlan], progress: ProgressFn) -> None:
    """Says what is not computed in its own format, once for each pair of formats."""
    found: dict[tuple[TensorType, TensorType], list[str]] = {}
    for plan in plans:
        if plan.stored_as != plan.tensor.type:
            found.setdefault((plan.tensor.type, plan.stored_as), []).append(plan.tensor.name)
    for (original, stored_as), names in found.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{others}: {original.name} is computed as {stored_as.name}"
        _log.info(text)
        progress(text)


class _Meter:
    """A progress line now and then."""

    def __init__(self, progress: ProgressFn, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._said = time.monotonic()

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        if time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self._said = time.monotonic()
            percent = math.floor(100 * self._done / self._total)
            self._progress(f"loading weights: {percent} % of {self._total >> 20} MiB")
