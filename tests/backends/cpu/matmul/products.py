"""Matrices of random weights, multiplied by the kernels and by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from localllm.backends.cpu.kernel import ROWS_TOKENS, Kernel
from localllm.backends.cpu.lower_linear import MatmulArgs, QuantizeArgs
from localllm.backends.cpu.matmul import FORMATS, WeightFormat
from localllm.gguf import TensorType
from tests.backends.cpu.kernels.harness import Header, address, aligned, run

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SUPER_BLOCKS = (
    TensorType.Q2_K,
    TensorType.Q3_K,
    TensorType.Q4_K,
    TensorType.Q5_K,
    TensorType.Q6_K,
    TensorType.IQ4_XS,
)
FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


def step_of_k(kind: TensorType) -> int:
    """What the columns of a matrix of this format are a multiple of."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType(kind)][0])


def random_weights(kind: TensorType, rows: int, cols: int, seed: int = 0) -> Bytes:
    """A matrix as the file holds it: every bit of the quants at random, plausible scales."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        raw = quants.quantize(values, GGMLQuantizationType(kind))
        return np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    if kind == TensorType.MXFP4:
        raw[..., 0] = rng.integers(114, 122, (rows, cols // block), dtype=np.uint8)
    for at in scale_offsets(kind):
        scales = rng.uniform(-0.01, 0.01, (rows, cols // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def extreme_weights(kind: TensorType, rows: int, cols: int, byte: int) -> Bytes:
    """All quants and integer scales have the same bits."""
    if kind in FLOATS:
        return random_weights(kind, rows, cols)
    raw = np.full_like(random_weights(kind, rows, cols), byte).reshape(
        rows, cols // step_of_k(kind), -1
    )
    if kind == TensorType.MXFP4:
        raw[..., 0] = 120
    for at in scale_offsets(kind):
        raw[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def scale_offsets(kind: TensorType) -> tuple[int, ...]:
    """Where a block of the file has its float16 numbers."""
    return _SCALE_OFFSETS.get(kind, (0,))


_SCALE_OFFSETS = {
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_1: (0, 2),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q6_K: (208,),
    TensorType.MXFP4: (),
}


def dequantize(raw: Bytes, kind: TensorType) -> Floats:
    values = quants.dequantize(raw, GGMLQuantizationType(kind))
    return values.astype(np.float32).reshape(len(raw), -1)


def as_multiplied(x: Floats, activation: str) -> npt.NDArray[np.float64]:
    """Activations as the kernel rounds them: int8 in blocks with a scale of their own."""
    if activation == "f32":
        return x.astype(np.float64)
    blocks = x.reshape(-1, 256 if activation == "q8_256" else 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    safe = np.where(largest > 0, largest, np.float32(1))
    rounded = np.rint(blocks * (np.float32(127) / safe)).astype(np.float64)
    scales = (largest / np.float32(127)).astype(np.float64)
    product: npt.NDArray[np.float64] = rounded * scales
    return product.reshape(x.shape)


class Matrix:
    """One packed matrix, or several experts' of the same size behind one another."""

    def __init__(self, kind: TensorType, raws: Sequence[Bytes], cols: int) -> None:
        self.kind, self.cols = kind, cols
        self.format: WeightFormat = FORMATS[kind]
        self.rows = len(raws[0])
        self.bytes = self.format.packed_bytes(self.rows, cols)
        self.packed = aligned(self.bytes * len(raws))
        for i, raw in enumerate(raws):
            part = self.packed[i * self.bytes : (i + 1) * self.bytes]
            self.format.pack(raw, self.rows, cols, part, 0, -(-self.rows // 8))

    def panel(self, x: Floats, threads: int = 1, gather: Any = None) -> Bytes:
        """Quantized rows of x, or those that `gather` lists."""
        form = self.format.activation
        n = len(x) if gather is None else len(gather)
        panel = aligned(form.bytes(n, self.cols))
        count = np.array([n], np.int64)
        arguments = QuantizeArgs(
            x=address(x),
            x_stride=x.strides[0] // 4,
            rows=ROWS_TOKENS,
            cols=self.cols,
            panel=address(panel),
            gathered=int(gather is not None),
            gather=address(gather),
            count=address(count),
        )
        run(form.quantize, arguments, Header(tokens=len(x)), threads)
        return panel

    def multiply(
        self,
        panel: Bytes,
        n: int,
        *,
        threads: int = 1,
        out: Floats | None = None,
        bias: Floats | None = None,
        residual: Floats | None = None,
        maxima: Floats | None = None,
        start: npt.NDArray[np.int64] | None = None,
    ) -> Floats:
        """The product for n columns; `start` gives the experts' ranges of columns."""
        if out is None:
            out = np.full((n, self.rows), np.nan, np.float32)
        per_thread = self.format.matmul_scratch_bytes(self.cols)
        scratch = aligned(per_thread * threads)
        arguments = MatmulArgs(
            panel=address(panel),
            packed=address(self.packed),
            rows=self.rows,
            cols=self.cols,
            out=address(out),
            out_stride=out.strides[0] // 4,
            row_kind=ROWS_TOKENS,
            bias=address(bias),
            scratch=address(scratch),
            scratch_bytes=per_thread,
            experts=0 if start is None else len(start) - 1,
            segment_start=address(start),
            expert_bytes=self.bytes,
            residual=address(residual),
            residual_stride=0 if residual is None else residual.strides[0] // 4,
            maxima=address(maxima),
        )
        run(self.format.matmul, arguments, Header(tokens=n), threads)
        return out

    def __call__(self, x: Floats, threads: int = 1) -> Floats:
        return self.multiply(self.panel(x, threads), len(x), threads=threads)


def kernels_of(kinds: Sequence[TensorType]) -> list[Kernel]:
    found: dict[str, Kernel] = {}
    for kind in kinds:
        form = FORMATS[kind]
        for kernel in (form.pack_kernel, form.matmul, form.embed, form.activation.quantize):
            found[kernel.name] = kernel
    return list(found.values())
