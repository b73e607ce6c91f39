"""Ops whose only readers are matmuls leave their rows quantized: one pass instead of two.

The rows are computed and turned into records (see `matmul.activations`) while they are in the
first-level cache. The arithmetic is that of the two kernels that these stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localllm.backends.cpu.kernel import (
    Kernel,
    arg_f32,
    arg_i64,
    claim,
    inlined,
    kernel,
    kernel_factory,
    row_count,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.kernels.functions import ACTIVATIONS
from localllm.backends.cpu.kernels.norm import run_normalizer
from localllm.backends.cpu.matmul.activations import CHUNK, CLAIM_CHUNKS, RECORD_BYTES, RECORDERS
from localllm.backends.cpu.simd import load_f32x8, store_f32x8

_CHUNK_BYTES = CHUNK * 4
_NORM_ELEMENTS_PER_CLAIM = 2048


@dataclass(frozen=True)
class NormQuantizeArgs(Arguments):
    """Words of `norm_quantize`: the norm of whole rows of x, as a panel and, if `out`, as float32.

    `scratch` has `norm_scratch_bytes(width)` for each thread.
    """

    panel: int
    rows: int  # row kind
    width: int
    x: int
    x_stride: int
    weight: int
    bias: int
    eps: float
    out: int  # or 0
    out_stride: int
    scratch: int
    scratch_bytes: int  # per thread


@dataclass(frozen=True)
class ActMulQuantizeArgs(Arguments):
    """Words of `act_mul_quantize`: act(gate) * up as a panel.

    `scratch` has `ACT_MUL_SCRATCH_BYTES` for each thread.
    """

    panel: int
    rows: int  # row kind
    width: int  # a multiple of 8
    gate: int
    gate_stride: int
    up: int
    up_stride: int
    scratch: int
    scratch_bytes: int  # per thread


_PANEL, _ROWS, _WIDTH = range(FIRST_WORD, FIRST_WORD + 3)
_X, _X_STRIDE, _WEIGHT, _BIAS, _EPS, _OUT, _OUT_STRIDE, _N_SCRATCH, _N_SCRATCH_BYTES = range(
    FIRST_WORD + 3, FIRST_WORD + 12
)
_GATE, _GATE_STRIDE, _UP, _UP_STRIDE, _A_SCRATCH, _A_SCRATCH_BYTES = range(
    FIRST_WORD + 3, FIRST_WORD + 9
)
ACT_MUL_SCRATCH_BYTES = _CHUNK_BYTES


def norm_scratch_bytes(width: int) -> int:
    return 4 * width


@kernel_factory
def norm_quantize(kind: str, has_weight: bool, has_bias: bool, activation: str) -> Kernel:
    """`norm` of whole rows, quantized as `activation` says."""
    one_run = run_normalizer(kind, has_weight, has_bias)
    record, record_bytes = RECORDERS[activation], RECORD_BYTES[activation]

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        rows, width = row_count(args, arg_i64(args, _ROWS)), arg_i64(args, _WIDTH)
        chunks = (width + CHUNK - 1) // CHUNK
        size = (_NORM_ELEMENTS_PER_CLAIM + width - 1) // width
        first = claim(args, size)
        while first < rows:
            for row in range(first, min(first + size, rows)):
                out = arg_i64(args, _N_SCRATCH) + tid * arg_i64(args, _N_SCRATCH_BYTES)
                if arg_i64(args, _OUT):
                    out = arg_i64(args, _OUT) + row * arg_i64(args, _OUT_STRIDE) * 4
                x = arg_i64(args, _X) + row * arg_i64(args, _X_STRIDE) * 4
                weight, bias = arg_i64(args, _WEIGHT), arg_i64(args, _BIAS)
                one_run(out, x, width, weight, bias, arg_f32(args, _EPS))
                for chunk in range(chunks):
                    to = arg_i64(args, _PANEL) + (chunk * rows + row) * record_bytes
                    record(out + chunk * _CHUNK_BYTES, to, min(CHUNK, width - chunk * CHUNK))
            first = claim(args, size)

    return run


@kernel_factory
def act_mul_quantize(name: str, activation: str) -> Kernel:
    """`elementwise.act_mul`, quantized as `activation` says."""
    act = ACTIVATIONS[name]
    record, record_bytes = RECORDERS[activation], RECORD_BYTES[activation]

    @inlined
    def one_chunk(gate: Any, up: Any, product: Any, to: Any, count: Any) -> None:
        for at in range(0, count * 4, 32):
            store_f32x8(product, at, act(load_f32x8(gate, at)) * load_f32x8(up, at))
        record(product, to, count)

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        rows, width = row_count(args, arg_i64(args, _ROWS)), arg_i64(args, _WIDTH)
        chunks = (width + CHUNK - 1) // CHUNK
        pieces = (chunks + CLAIM_CHUNKS - 1) // CLAIM_CHUNKS
        product = arg_i64(args, _A_SCRATCH) + tid * arg_i64(args, _A_SCRATCH_BYTES)
        item = claim(args, 1)
        while item < rows * pieces:
            row, first = item // pieces, item % pieces * CLAIM_CHUNKS
            gate = arg_i64(args, _GATE) + row * arg_i64(args, _GATE_STRIDE) * 4
            up = arg_i64(args, _UP) + row * arg_i64(args, _UP_STRIDE) * 4
            for chunk in range(first, min(first + CLAIM_CHUNKS, chunks)):
                at, count = chunk * _CHUNK_BYTES, min(CHUNK, width - chunk * CHUNK)
                to = arg_i64(args, _PANEL) + (chunk * rows + row) * record_bytes
                one_chunk(gate + at, up + at, product, to, count)
            item = claim(args, 1)

    return run
