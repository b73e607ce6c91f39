"""Lowering of the ops that work on one row, or one element, at a time."""

from __future__ import annotations

from localllm.backends.cpu.builder import Builder, Operand
from localllm.backends.cpu.kernel import Kernel
from localllm.backends.cpu.kernels import elementwise, quantized, rows
from localllm.backends.cpu.kernels.elementwise import ElementwiseArgs
from localllm.backends.cpu.kernels.norm import NormArgs, norm
from localllm.backends.cpu.kernels.rows import RowsArgs
from localllm.backends.cpu.plan import whole
from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    Norm,
    PositionScale,
    Scale,
    SelectRows,
    Softcap,
)


def lower_add(build: Builder, op: Add) -> None:
    out, a, b = map(build.operand, (op.out, op.a, op.b))
    binary(build, elementwise.add(), out, a, b)


def lower_act_mul(build: Builder, op: ActMul) -> None:
    out, gate, up = map(build.operand, (op.out, op.gate, op.up))
    if op.out not in build.fusions.panels:
        binary(build, elementwise.act_mul(op.act), out, gate, up)
        return
    panel, form = build.panel(op.out), build.fusions.panels[op.out].format
    build.need_scratch(quantized.ACT_MUL_SCRATCH_BYTES)
    build.call(
        quantized.act_mul_quantize(op.act, form.name),
        lambda: quantized.ActMulQuantizeArgs(
            panel=panel.address,
            rows=out.rows,
            width=out.width,
            gate=gate.address,
            gate_stride=gate.stride,
            up=up.address,
            up_stride=up.stride,
            scratch=build.scratch_address,
            scratch_bytes=build.scratch_bytes,
        ),
        reads=[gate.region, up.region],
        writes=[whole(panel)],
        work=out.width,
    )


def lower_scale(build: Builder, op: Scale) -> None:
    unary(build, elementwise.scale(), build.operand(op.out), build.operand(op.x), op.factor)


def lower_softcap(build: Builder, op: Softcap) -> None:
    unary(build, elementwise.softcap(), build.operand(op.out), build.operand(op.x), op.cap)


def lower_activation(build: Builder, op: Activation) -> None:
    unary(build, elementwise.activation(op.act), build.operand(op.out), build.operand(op.x))


def unary(build: Builder, kernel: Kernel, out: Operand, x: Operand, factor: float = 0.0) -> None:
    build.call(
        kernel,
        lambda: ElementwiseArgs(
            out.address, out.stride, x.rows, x.width, x.address, x.stride, factor=float(factor)
        ),
        reads=[x.region],
        writes=[out.region],
        work=x.width,
    )


def binary(
    build: Builder, kernel: Kernel, out: Operand, x: Operand, y: Operand, per_row: int = 1
) -> None:
    build.call(
        kernel,
        lambda: ElementwiseArgs(
            out.address,
            out.stride,
            x.rows,
            x.width,
            x.address,
            x.stride,
            y.address,
            y.stride,
            per_row=per_row,
        ),
        reads=[x.region, y.region],
        writes=[out.region],
        work=x.width,
    )


def lower_norm(build: Builder, op: Norm) -> None:
    out, x = build.operand(op.out), build.operand(op.x)
    weight, weight_size = build.weights.vector(op.weight)
    bias, bias_size = build.weights.vector(op.bias)
    for name, size in ((op.weight, weight_size), (op.bias, bias_size)):
        if name is not None and size not in (op.group, x.width):
            raise ValueError(f"{name} has {size} entries for {x.width} columns in {op.group}s")
    if op.out in build.fusions.panels:
        _norm_quantize(build, op)
        return
    build.call(
        norm(op.kind, op.weight is not None, op.bias is not None),
        lambda: NormArgs(
            out=out.address,
            out_stride=out.stride,
            rows=x.rows,
            width=x.width,
            x=x.address,
            x_stride=x.stride,
            group=op.group,
            weight=weight,
            weight_step=op.group if weight_size > op.group else 0,
            bias=bias,
            bias_step=op.group if bias_size > op.group else 0,
            eps=float(op.eps),
        ),
        reads=[x.region],
        writes=[out.region],
        work=x.width,
    )


def _norm_quantize(build: Builder, op: Norm) -> None:
    out, x = build.operand(op.out), build.operand(op.x)
    weight, bias = build.weights.vector(op.weight)[0], build.weights.vector(op.bias)[0]
    wanted, panel = build.fusions.panels[op.out], build.panel(op.out)
    build.need_scratch(quantized.norm_scratch_bytes(x.width))
    build.call(
        quantized.norm_quantize(
            op.kind, op.weight is not None, op.bias is not None, wanted.format.name
        ),
        lambda: quantized.NormQuantizeArgs(
            panel=panel.address,
            rows=x.rows,
            width=x.width,
            x=x.address,
            x_stride=x.stride,
            weight=weight,
            bias=bias,
            eps=float(op.eps),
            out=0 if wanted.alone else out.address,
            out_stride=out.stride,
            scratch=build.scratch_address,
            scratch_bytes=build.scratch_bytes,
        ),
        reads=[x.region],
        writes=[whole(panel)] if wanted.alone else [whole(panel), out.region],
        work=x.width,
    )


def lower_select_rows(build: Builder, op: SelectRows) -> None:
    out, x = build.operand(op.out), build.operand(op.x)
    build.call(
        rows.select_rows,
        lambda: RowsArgs(out.address, out.stride, x.width, x.address, x.stride),
        reads=[x.region],
        writes=[out.region],
        work=x.width,
    )


def lower_position_scale(build: Builder, op: PositionScale) -> None:
    out, x = build.operand(op.out), build.operand(op.x)
    build.call(
        rows.position_scale,
        lambda: RowsArgs(
            out.address,
            out.stride,
            x.width,
            x.address,
            x.stride,
            float(op.beta),
            float(op.floor_scale),
            float(op.offset),
        ),
        reads=[x.region],
        writes=[out.region],
        work=x.width,
    )
