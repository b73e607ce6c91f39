"""Where a step's time goes, next to the least that the machine could take for it.

Only who asks pays: a step that is not profiled runs without any of this.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from localllm.backends.base import Batch
from localllm.backends.cpu.kernel import ROWS_LOGITS
from localllm.backends.cpu.kernels.attention import AttendArgs
from localllm.backends.cpu.kernels.kv import F16_BYTES
from localllm.backends.cpu.lower_linear import MatmulArgs
from localllm.backends.cpu.machine import Machine
from localllm.backends.cpu.matmul import FORMATS
from localllm.backends.cpu.plan import Call
from localllm.backends.cpu.step import CpuStep
from localllm.gguf import TensorType

_FLOATS = ("F32", "F16", "BF16")
_KINDS = {  # of kernels, by the module that they are in, or by name
    "act_mul_quantize": "activation, gate, quantize",
    "norm_quantize": "norm, quantize",
    "rope_kv": "rope, KV store",
    "activations": "quantize",
    "kv": "KV store",
    "moe_routing": "expert routing",
    "pack": "embedding",
    "rows": "row selection",
}


@dataclass(frozen=True)
class Work:
    """What a call cannot do without; zeros where that is too little to matter, or not known."""

    bytes: int = 0  # read from memory
    int8_products: int = 0
    f32_products: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.bytes + other.bytes,
            self.int8_products + other.int8_products,
            self.f32_products + other.f32_products,
        )


@dataclass(frozen=True)
class Share:
    """All calls of one kind of operation. `seconds` are theirs together, run one at a time."""

    kind: str
    calls: int
    seconds: float
    work: Work

    def floor(self, machine: Machine) -> float:
        """Seconds for the reads or for the products, whichever take longer."""
        return max(self._reading(machine), self._multiplying(machine))

    def bound(self, machine: Machine) -> str:
        """What that floor is made of."""
        if not self.floor(machine):
            return ""
        reads = self._reading(machine) >= self._multiplying(machine)
        return "reads" if reads else "products"

    def _reading(self, machine: Machine) -> float:
        return self.work.bytes / machine.read_bytes

    def _multiplying(self, machine: Machine) -> float:
        return (
            self.work.int8_products / machine.int8_products
            + self.work.f32_products / machine.f32_products
        )


def break_down(step: CpuStep, batch: Batch, repeats: int) -> list[Share]:
    """Runs the batch `repeats` times; the kinds of operations in order of falling time.

    The time of a call is the median of its times.
    """
    runs = [step.profile(batch) for _ in range(repeats)]
    grouped: dict[str, list[tuple[float, Work]]] = {}
    for same in zip(*runs, strict=True):
        call = same[0][0]
        seconds = statistics.median(nanoseconds for _, nanoseconds in same) / 1e9
        grouped.setdefault(kind_of(call), []).append((seconds, work_of(call, batch)))
    shares = [
        Share(kind, len(calls), sum(s for s, _ in calls), sum((w for _, w in calls), Work()))
        for kind, calls in grouped.items()
    ]
    return sorted(shares, key=lambda share: -share.seconds)


def kind_of(call: Call) -> str:
    """Such as "matmul Q4_K" or "norm"."""
    if isinstance(call.arguments(), MatmulArgs):
        return f"matmul {_format(call)}"
    origin = call.kernel.origin
    module = origin.module.rpartition(".")[2]
    return _KINDS.get(origin.qualname, _KINDS.get(module, module))


def work_of(call: Call, batch: Batch) -> Work:
    """Nothing for experts: who is chosen shows only as the step runs."""
    match call.arguments():
        case MatmulArgs(rows=rows, cols=cols, row_kind=kind, experts=0):
            name = _format(call)
            columns = batch.logit_rows.size if kind == ROWS_LOGITS else batch.ids.size
            n_bytes = FORMATS[TensorType[name]].packed_bytes(rows, cols) if columns else 0
            products = rows * cols * columns
            if name in _FLOATS:
                return Work(n_bytes, f32_products=products)
            return Work(n_bytes, int8_products=products)
        case AttendArgs() as attend:
            return _attention(attend, batch)
        case _:
            return Work()


def _format(call: Call) -> str:
    """The weight format that a matmul's kernel is made for."""
    arguments = call.kernel.origin.arguments
    assert arguments is not None
    return str(arguments[0])


def _attention(args: AttendArgs, batch: Batch) -> Work:
    """Each sequence's keys and values in reach are read once; each query multiplies its own."""
    dims = args.key_dim + args.value_dim
    window = args.window or int(batch.seq_lens.max(initial=0))
    seen = np.minimum(batch.positions.astype(np.int64) + 1, window)
    lengths = batch.seq_lens.astype(np.int64)
    read = np.minimum(lengths, window + np.diff(batch.query_start) - 1)
    return Work(
        bytes=int(read.sum()) * args.kv_heads * dims * F16_BYTES,
        f32_products=int(seen.sum()) * args.heads * dims,
    )
