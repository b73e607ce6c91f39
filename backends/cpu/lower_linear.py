"""Lowering of everything that multiplies by a weight matrix: embedding, linear, experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.backends.cpu.builder import FLOAT_BYTES, Builder, Operand
from localllm.backends.cpu.kernels import elementwise, moe_routing
from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.lower_simple import binary
from localllm.backends.cpu.matmul import ActivationFormat
from localllm.backends.cpu.plan import Buffer, whole
from localllm.backends.cpu.weights import Matrix
from localllm.backends.program import Embed, Linear, Moe


@dataclass(frozen=True)
class EmbedArgs(Arguments):
    """Words of `WeightFormat.embed`: out[t] = row ids[t] of a packed matrix."""

    out: int
    out_stride: int
    packed: int
    rows: int
    cols: int


@dataclass(frozen=True)
class QuantizeArgs(Arguments):
    """Words of `ActivationFormat.quantize`.

    Panel row i is row i of x; or, when `gathered`, row gather[i] of x for the first `count` i.
    """

    x: int
    x_stride: int
    rows: int  # row kind
    cols: int
    panel: int
    gathered: int = 0
    gather: int = 0  # int32
    count: int = 0  # address of an int64


@dataclass(frozen=True)
class MatmulArgs(Arguments):
    """Words of `WeightFormat.matmul`: out = panel @ packed.T + bias + residual.

    With experts, panel rows segment_start[e]..segment_start[e+1] are multiplied by matrix e.
    """

    panel: int
    packed: int
    rows: int
    cols: int
    out: int
    out_stride: int
    row_kind: int
    bias: int  # float32 [rows], or 0
    scratch: int
    scratch_bytes: int  # per thread
    experts: int = 0
    segment_start: int = 0  # int64 [experts + 1]
    expert_bytes: int = 0
    residual: int = 0  # float32, like out, or 0
    residual_stride: int = 0
    maxima: int = 0  # out, float32 [columns, row blocks], or 0: the largest of each eight rows


@dataclass(frozen=True)
class Segments:
    """Panel rows sorted by expert, as `order_by_expert` lays them out."""

    gather: Buffer  # int32: the step's row that a panel row is a copy of
    start: Buffer  # int64 [experts + 1]: an expert's range of panel rows
    experts: int
    per_row: int  # panel rows for each row of the step

    @property
    def count(self) -> int:
        """Address of the number of panel rows: the end of the last expert's range."""
        return self.start.address + self.experts * 8


def lower_embed(build: Builder, op: Embed) -> None:
    out, matrix = build.operand(op.out), build.weights.matrices[op.weight]
    build.call(
        matrix.format.embed,
        lambda: EmbedArgs(out.address, out.stride, matrix.address, matrix.rows, matrix.cols),
        writes=[out.region],
        work=out.width,
    )


def lower_linear(build: Builder, op: Linear) -> None:
    out, x, residual = build.operand(op.out), build.operand(op.x), None
    if add := build.fusions.residuals.get(op.out):
        residual = build.operand(add.a if add.b == op.out else add.b)
        out = build.operand(add.out)
    at = 0
    for matrix, bias in _joined(build, op):
        key = (op.x, matrix.format.activation.name)
        if key not in build.panels:
            build.panels[key] = quantize(build, matrix.format.activation, x)
        part = out.columns(at, matrix.rows)
        added = residual.columns(at, matrix.rows) if residual else None
        maxima = None
        if op.out == build.program.logits and matrix.rows == out.width:
            maxima = build.maxima = Buffer(build.capacity("R") * -(-matrix.rows // 8) * FLOAT_BYTES)
        matmul(build, matrix, build.panels[key], part, bias, residual=added, maxima=maxima)
        at += matrix.rows


def _joined(build: Builder, op: Linear) -> list[tuple[Matrix, int]]:
    """An op's matrices with the addresses of their biases.

    Neighbours in memory that have one format and no bias are one matrix: one call has less to
    agree on than several.
    """
    found: list[tuple[Matrix, int]] = []
    for name, bias in zip(op.weights, op.biases, strict=True):
        matrix, address = build.weights.matrices[name], build.weights.vector(bias)[0]
        if matrix.cols != op.x.width:
            raise ValueError(f"{name} has {matrix.cols} columns for an input of {op.x.width}")
        if found and not address and not found[-1][1] and (both := found[-1][0].joined(matrix)):
            found[-1] = both, 0
        else:
            found.append((matrix, address))
    return found


def lower_moe(build: Builder, op: Moe) -> None:
    """Rows are copied to a panel expert by expert, so that each expert is one small matmul."""
    out, x = build.operand(op.out), build.operand(op.x)
    gate, up, down = (build.weights.matrices[name] for name in (op.gate, op.up, op.down))
    _check_columns(op.gate, gate, x)
    weight, position, segments = _route(build, op, gate.experts)
    gated, upped, answers = (
        build.matrix(matrix.rows, op.x.rows, op.used) for matrix in (gate, up, down)
    )
    panels: dict[str, Buffer] = {}
    for matrix, target in ((gate, gated), (up, upped)):
        form = matrix.format.activation
        if form.name not in panels:
            panels[form.name] = _gather(build, form, x, segments)
        matmul(build, matrix, panels[form.name], target, segments=segments)
    binary(build, elementwise.act_mul(op.act), gated, gated, upped, per_row=op.used)
    panel = _quantize_in_place(build, down.format.activation, gated, segments)
    matmul(build, down, panel, answers, segments=segments)
    build.call(
        moe_routing.combine_experts,
        lambda: moe_routing.CombineArgs(
            y=answers.address,
            y_stride=answers.stride,
            row_kind=x.rows,
            used=op.used,
            weight=weight.address,
            position=position.address,
            out=out.address,
            out_stride=out.stride,
            width=out.width,
        ),
        reads=[answers.region, whole(weight), whole(position)],
        writes=[out.region],
    )


def _route(build: Builder, op: Moe, experts: int) -> tuple[Buffer, Buffer, Segments]:
    """Chooses experts; returns buffers of their weights and panel rows, and the panel's order."""
    logits = build.operand(op.logits)
    pairs = build.capacity(op.x.rows) * op.used
    expert, weight, position, gather = (Buffer(pairs * 4) for _ in range(4))
    start = Buffer((experts + 1) * 8)
    scratch = Buffer(build.threads * experts * FLOAT_BYTES)
    build.call(
        moe_routing.route,
        lambda: moe_routing.RouteArgs(
            logits=logits.address,
            logits_stride=logits.stride,
            row_kind=logits.rows,
            experts=experts,
            used=op.used,
            gating=moe_routing.SIGMOID if op.gating == "sigmoid" else moe_routing.SOFTMAX,
            normalize=op.normalize,
            scale=float(op.scale),
            expert=expert.address,
            weight=weight.address,
            scratch=scratch.address,
        ),
        reads=[logits.region],
        writes=[whole(expert), whole(weight), whole(scratch)],
    )
    build.call(
        moe_routing.order_by_expert,
        lambda: moe_routing.OrderArgs(
            row_kind=logits.rows,
            experts=experts,
            used=op.used,
            expert=expert.address,
            gather=gather.address,
            segment_start=start.address,
            position=position.address,
        ),
        reads=[whole(expert)],
        writes=[whole(gather), whole(start), whole(position)],
    )
    return weight, position, Segments(gather, start, experts, op.used)


def quantize(build: Builder, form: ActivationFormat, x: Operand) -> Buffer:
    """The rows of x, in order, as a panel for matmuls."""
    capacity = x.buffer.n_bytes // (x.stride * FLOAT_BYTES)
    panel = Buffer(form.bytes(capacity, x.width))
    build.call(
        form.quantize,
        lambda: QuantizeArgs(x.address, x.stride, x.rows, x.width, panel.address),
        reads=[x.region],
        writes=[whole(panel)],
        work=x.width,
    )
    return panel


def _gather(build: Builder, form: ActivationFormat, x: Operand, segments: Segments) -> Buffer:
    """A panel of the rows of x that each expert wants."""
    capacity = x.buffer.n_bytes // (x.stride * FLOAT_BYTES) * segments.per_row
    panel = Buffer(form.bytes(capacity, x.width))
    build.call(
        form.quantize,
        lambda: QuantizeArgs(
            x.address,
            x.stride,
            x.rows,
            x.width,
            panel.address,
            1,
            segments.gather.address,
            segments.count,
        ),
        reads=[x.region, whole(segments.gather), whole(segments.start)],
        writes=[whole(panel)],
    )
    return panel


def _quantize_in_place(
    build: Builder, form: ActivationFormat, x: Operand, segments: Segments
) -> Buffer:
    """A panel of rows that already are in the experts' order."""
    capacity = x.buffer.n_bytes // (x.stride * FLOAT_BYTES)
    panel = Buffer(form.bytes(capacity, x.width))
    in_order = build.constant(np.arange(capacity, dtype=np.int32))
    build.call(
        form.quantize,
        lambda: QuantizeArgs(
            x.address, x.stride, x.rows, x.width, panel.address, 1, in_order, segments.count
        ),
        reads=[x.region, whole(segments.start)],
        writes=[whole(panel)],
    )
    return panel


def matmul(
    build: Builder,
    matrix: Matrix,
    panel: Buffer,
    out: Operand,
    bias: int = 0,
    segments: Segments | None = None,
    residual: Operand | None = None,
    maxima: Buffer | None = None,
) -> None:
    build.need_scratch(matrix.format.matmul_scratch_bytes(matrix.cols))
    build.call(
        matrix.format.matmul,
        lambda: MatmulArgs(
            panel.address,
            matrix.address,
            matrix.rows,
            matrix.cols,
            out.address,
            out.stride,
            out.rows,
            bias,
            build.scratch_address,
            build.scratch_bytes,
            segments.experts if segments else 0,
            segments.start.address if segments else 0,
            matrix.expert_bytes if segments else 0,
            residual.address if residual else 0,
            residual.stride if residual else 0,
            maxima.address if maxima else 0,
        ),
        reads=[
            whole(panel),
            *([whole(segments.start)] if segments else []),
            *([residual.region] if residual else []),
        ],
        writes=[out.region, *([whole(maxima)] if maxima else [])],
    )


def _check_columns(name: str, matrix: Matrix, x: Operand) -> None:
    if matrix.cols != x.width:
        raise ValueError(f"{name} has {matrix.cols} columns for an input of {x.width}")
