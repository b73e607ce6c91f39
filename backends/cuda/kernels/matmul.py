"""out = x @ weight.T for quantized and plain weights: one kernel for any number of columns.

Weights are the left operand of `tl.dot`, so a column's sums do not know of other columns. K is cut
into splits of a length that depends on the weight's shape alone; a split's sum runs over chunks of
128 in order, and the splits' sums are added in order. Few columns: splits run side by side and a
second kernel adds them, since one row of tiles would not fill a GPU. Many: one program runs
through all splits. The bits are the same.

Rows of a gate above as many of an `up` may give act(gate) * up: where one program runs through all
splits, half of its rows are of the gate and half of `up`; else the second kernel reads both sums.

With experts, columns are (row, rank) pairs sorted by expert (see `moe`), each tile of columns
with weights of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.cuda.kernels.dequantize import weights_chunk
from localllm.backends.cuda.kernels.elementwise import activate
from localllm.backends.cuda.kernels.layout import CHUNK, PLAIN, TILE_ROWS, PackedWeight
from localllm.backends.program import ActivationName

PARALLEL_PROGRAMS = 512  # what fills the largest GPUs; more splits than that only cost
MIN_SPLIT_CHUNKS = 4
# Of a gated product of few columns, so that all its programs run at once: it would take more, but
# hardly spills.
GATED_REGISTERS = 128
SMALL_SHARED_MEMORY = 99 << 10  # bytes for one program on the GPUs that have least


@triton.jit
def _load_columns(x, x_rows, x_stride, k_start, cols, valid):
    k = k_start + tl.arange(0, 128)
    at = x_rows.to(tl.int64)[None, :] * x_stride + k[:, None]
    return tl.load(x + at, mask=valid[None, :] & (k < cols)[:, None], other=0.0)


@triton.jit
def _split_sum(
    x, codes, high, scales, supers, rows, n_rows, cols, x_rows, x_stride, valid, first, last,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sum over chunks first..last, [BLOCK_N, BLOCK_C] float32."""
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for chunk in range(first, last):
        w = weights_chunk(
            codes, high, scales, supers, rows, n_rows, cols, chunk, FORMAT, BLOCK_N
        ).to(x.dtype.element_ty)
        columns = _load_columns(x, x_rows, x_stride, chunk * 128, cols, valid)
        total = tl.dot(w, columns, total, input_precision="ieee")
    return total


@triton.jit
def _with_bias(total, bias, rows, n_rows, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < n_rows, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _store_gated(
    gate, up, out, rows, n_rows, out_rows, out_stride, valid, ACT: tl.constexpr
):  # fmt: skip
    """act(gate) * up of sums [rows, columns], each rounded as if it had been stored by itself."""
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    at = out_rows.to(tl.int64)[None, :] * out_stride + rows[:, None]
    values = (activate(gate, ACT) * up).to(out.dtype.element_ty)
    tl.store(out + at, values, mask=(rows < n_rows)[:, None] & valid[None, :])


@triton.jit
def _store(
    total, residual, out, rows, n_rows, out_rows, residual_stride, out_stride, valid,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds the residual to the sums [rows, columns] and stores them."""
    mask = (rows < n_rows)[:, None] & valid[None, :]
    if HAS_RESIDUAL:
        at = out_rows.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    at = out_rows.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_columns"])
def _matmul_kernel(
    x, codes, high, scales, supers, bias, residual, out, pairs, tile_experts,
    n_rows, cols, n_columns, x_stride, residual_stride, out_stride, x_divisor,
    code_stride, high_stride, scale_stride, super_stride,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    SPLIT_CHUNKS: tl.constexpr, PARTIAL: tl.constexpr, GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    if ACT is None:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        i = tl.arange(0, BLOCK_N)
        rows = tl.program_id(0) * HALF + i % HALF + i // HALF * (n_rows // 2)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if GROUPED:
        expert = tl.load(tile_experts + tl.program_id(1)).to(tl.int64)
        if expert < 0:
            return
        column = tl.load(pairs + column)
        valid = column >= 0
        codes += expert * code_stride
        high += expert * high_stride
        scales += expert * scale_stride
        supers += expert * super_stride
        x_rows = column // x_divisor
    else:
        valid = column < n_columns
        x_rows = column

    chunks = tl.cdiv(cols, 128)
    if PARTIAL:
        split = tl.program_id(2)
        first = split * SPLIT_CHUNKS
        last = tl.minimum(first + SPLIT_CHUNKS, chunks)
        total = _split_sum(
            x, codes, high, scales, supers, rows, n_rows, cols, x_rows, x_stride, valid,
            first, last, FORMAT, BLOCK_N, BLOCK_C,
        )  # fmt: skip
        place = (split * n_columns + column).to(tl.int64)[None, :] * n_rows + rows[:, None]
        tl.store(out + place, total, mask=(rows < n_rows)[:, None] & valid[None, :])
    else:
        total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
        for first in range(0, chunks, SPLIT_CHUNKS):
            total += _split_sum(
                x, codes, high, scales, supers, rows, n_rows, cols, x_rows, x_stride, valid,
                first, tl.minimum(first + SPLIT_CHUNKS, chunks), FORMAT, BLOCK_N, BLOCK_C,
            )  # fmt: skip
        total = _with_bias(total, bias, rows, n_rows, HAS_BIAS)
        if ACT is None:
            _store(
                total, residual, out, rows, n_rows, column, residual_stride, out_stride, valid,
                HAS_RESIDUAL,
            )  # fmt: skip
        else:
            halves = tl.permute(tl.reshape(total, (2, HALF, BLOCK_C)), (1, 2, 0))
            gate, up = tl.split(halves)
            rows = tl.program_id(0) * HALF + tl.arange(0, HALF)
            _store_gated(gate, up, out, rows, n_rows // 2, column, out_stride, valid, ACT)


@triton.jit
def _sum_of_splits(partial, rows, n_rows, column, n_columns, n_splits, BLOCK_N: tl.constexpr):
    total = tl.zeros((BLOCK_N, 1), tl.float32)
    for split in range(n_splits):
        place = (split * n_columns + column).to(tl.int64)[None, :] * n_rows + rows[:, None]
        total += tl.load(partial + place, mask=(rows < n_rows)[:, None], other=0.0)
    return total


@triton.jit(do_not_specialize=["n_columns"])
def _add_splits_kernel(
    partial, bias, residual, out, n_rows, n_columns, n_splits, residual_stride, out_stride,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) + tl.arange(0, 1)
    valid = column < n_columns
    total = _sum_of_splits(partial, rows, n_rows, column, n_columns, n_splits, BLOCK_N)
    total = _with_bias(total, bias, rows, n_rows, HAS_BIAS)
    if ACT is None:
        _store(
            total, residual, out, rows, n_rows, column, residual_stride, out_stride, valid,
            HAS_RESIDUAL,
        )  # fmt: skip
    else:
        below = rows + n_rows // 2
        up = _sum_of_splits(partial, below, n_rows, column, n_columns, n_splits, BLOCK_N)
        up = _with_bias(up, bias, below, n_rows, HAS_BIAS)
        _store_gated(total, up, out, rows, n_rows // 2, column, out_stride, valid, ACT)


@dataclass(frozen=True)
class Tiles:
    """The shape of a launch; nothing in it changes a result's bits."""

    rows: int
    columns: int
    warps: int
    stages: int
    side_by_side: bool  # splits are programs of their own


def tiles_for(columns: int, dtype: torch.dtype = torch.bfloat16) -> Tiles:
    """The one table of launch shapes. Rows per warp group stay 64: the same instructions."""
    if columns <= 16:
        return Tiles(TILE_ROWS, 16, warps=4, stages=4, side_by_side=True)
    if columns <= 64:
        return Tiles(TILE_ROWS, 64, warps=4, stages=3, side_by_side=True)
    if dtype == torch.float32:  # wider tiles would not fit in shared memory
        return Tiles(TILE_ROWS, 64, warps=4, stages=2, side_by_side=False)
    return Tiles(2 * TILE_ROWS, 128, warps=8, stages=3, side_by_side=False)


def _stages(shape: Tiles, x: Tensor, weight: PackedWeight) -> int:
    """As many stages of loads in flight as the device's shared memory holds."""
    weight_bytes = weight.codes.element_size() if weight.type in PLAIN else 1
    stage = CHUNK * (shape.columns * x.element_size() + shape.rows * weight_bytes)
    return max(1, min(shape.stages, _shared_memory(x.device) // stage))


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return SMALL_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    usual = properties.shared_memory_per_block
    return int(getattr(properties, "shared_memory_per_block_optin", usual))


def split_chunks(rows: int, cols: int) -> int:
    """Chunks of K per split, by the weight's shape alone: it decides the order of the sums."""
    chunks = _ceil_div(cols, CHUNK)
    row_tiles = _ceil_div(rows, TILE_ROWS)
    splits = max(1, min(PARALLEL_PROGRAMS // row_tiles, chunks // MIN_SPLIT_CHUNKS))
    return _ceil_div(chunks, splits)


def partial_floats(rows: int, cols: int, columns: int) -> int:
    """Float32 entries of scratch that `matmul` needs for that many columns."""
    if not tiles_for(columns).side_by_side:
        return 0
    return columns * rows * _splits(rows, cols)


def _splits(rows: int, cols: int) -> int:
    return _ceil_div(_ceil_div(cols, CHUNK), split_chunks(rows, cols))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Grouping:
    """Which pairs meet which expert: see `moe.group_pairs`."""

    pairs: Tensor  # int32 [tiles * tiles_for(...).columns]; -1: nothing
    tile_experts: Tensor  # int32 [tiles]; -1: an empty tile
    divisor: int  # pair p reads row p // divisor of x


def matmul(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scratch: Tensor | None = None,
    act: ActivationName | None = None,
    grouping: Grouping | None = None,
    tiles: Tiles | None = None,
) -> None:
    """out = x @ weight.T + bias + residual, all but the weight [columns, width].

    With `act`, which takes no residual, the upper half of the weight's rows is a gate: out is
    act(gate) * up, half as wide, of gate and up in out's type.
    x, residual and out may be windows of wider matrices (last dimension contiguous). Products are
    taken in x's type (float16, bfloat16 or float32), summed in float32 and rounded to out's type.
    `scratch`: float32, at least `partial_floats`; allocated when absent. With a grouping out has a
    row per pair.
    """
    columns = len(out)
    if columns == 0:
        return
    shape = tiles or tiles_for(columns, x.dtype)
    column_tiles = _ceil_div(columns, shape.columns)
    if grouping:
        column_tiles = len(grouping.tile_experts)
    per_split = split_chunks(weight.rows, weight.cols)
    splits = _splits(weight.rows, weight.cols)
    partial = shape.side_by_side and splits > 1
    at_once = None if partial else act
    row_tiles = _ceil_div(weight.rows, shape.rows)
    if at_once:
        row_tiles = _ceil_div(weight.rows // 2, shape.rows // 2)
    target = out
    if partial:
        needed = splits * columns * weight.rows
        if scratch is None:
            scratch = torch.empty(needed, dtype=torch.float32, device=x.device)
        target = scratch
    _matmul_kernel[(row_tiles, column_tiles, splits if partial else 1)](
        x, weight.codes, weight.high, weight.scales, weight.supers,
        bias, residual, target,
        grouping.pairs if grouping else None, grouping.tile_experts if grouping else None,
        weight.rows, weight.cols, columns,
        x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0),
        grouping.divisor if grouping else 1,
        *_expert_strides(weight),
        FORMAT=weight.type.name, BLOCK_N=shape.rows, BLOCK_C=shape.columns,
        SPLIT_CHUNKS=per_split, PARTIAL=partial, GROUPED=grouping is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACT=at_once,
        num_warps=shape.warps, num_stages=_stages(shape, x, weight), enable_fp_fusion=False,
        maxnreg=GATED_REGISTERS if at_once and shape.columns <= 16 else None,
    )  # fmt: skip
    if partial:
        _add_splits_kernel[(_ceil_div(out.shape[1], 256), columns)](
            scratch, bias, residual, out, weight.rows, columns, splits,
            residual.stride(0) if residual is not None else 0, out.stride(0),
            BLOCK_N=256, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACT=act,
            enable_fp_fusion=False,
        )  # fmt: skip


def _expert_strides(weight: PackedWeight) -> tuple[int, int, int, int]:
    planes = (weight.codes, weight.high, weight.scales, weight.supers)
    a, b, c, d = (plane.numel() // weight.experts for plane in planes)
    return a, b, c, d
