"""From a program's ops to a plan of kernel calls.

Each op becomes a few calls. Activations are quantized once for each format that reads them,
whoever reads; a rotary table is computed once per step; some ops share a call (`fusion`). What a
call reads and writes is recorded with it, and the plan finds order and memory from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.backends.base import StepLimits
from localllm.backends.cpu.builder import Builder, Operand
from localllm.backends.cpu.fusion import Fusions, find_fusions
from localllm.backends.cpu.lower_attention import lower_attention, lower_rope, lower_sampling
from localllm.backends.cpu.lower_linear import lower_embed, lower_linear, lower_moe
from localllm.backends.cpu.lower_simple import (
    lower_act_mul,
    lower_activation,
    lower_add,
    lower_norm,
    lower_position_scale,
    lower_scale,
    lower_select_rows,
    lower_softcap,
)
from localllm.backends.cpu.plan import Buffer
from localllm.backends.cpu.weights import Weights
from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    Attention,
    Embed,
    Linear,
    Moe,
    Norm,
    PositionScale,
    Program,
    Rope,
    Scale,
    SelectRows,
    Softcap,
)

_LOWER: dict[type, Callable[[Builder, Any], None]] = {
    Activation: lower_activation,
    ActMul: lower_act_mul,
    Add: lower_add,
    Attention: lower_attention,
    Embed: lower_embed,
    Linear: lower_linear,
    Moe: lower_moe,
    Norm: lower_norm,
    PositionScale: lower_position_scale,
    Rope: lower_rope,
    Scale: lower_scale,
    SelectRows: lower_select_rows,
    Softcap: lower_softcap,
}


@dataclass(frozen=True)
class Lowered:
    """A finished plan and where its results will be."""

    builder: Builder
    outputs: list[Operand]  # of each op
    logits: Operand
    tokens: Buffer  # int32 [R]


def lower(
    program: Program,
    weights: Weights,
    limits: StepLimits,
    threads: int,
    fusions: Fusions | None = None,
) -> Lowered:
    """The plan of a whole step, sampling included; `fusions` are all that can be found."""
    if any(type(op) not in _LOWER for op in program.ops):
        raise ValueError("the cpu backend has no ranks")
    if program.logits is None or program.logits.rows != "R":
        raise ValueError("the program does not end in logits of selected rows")
    if fusions is None:
        fusions = find_fusions(program, weights)
    builder = Builder(program, weights, limits, threads, fusions)
    for index, op in enumerate(program.ops):
        builder.begin(index)
        if op.out not in fusions.absorbed:
            _LOWER[type(op)](builder, op)
    builder.begin(len(program.ops))
    logits = builder.operand(program.logits)
    tokens = lower_sampling(builder, logits)
    builder.plan.finish()
    outputs = [builder.operand(op.out) for op in program.ops]
    return Lowered(builder, outputs, logits, tokens)
