"""From the ops of a program to closures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    AllGather,
    AllReduce,
    Attention,
    Embed,
    Linear,
    Moe,
    Norm,
    Op,
    PositionScale,
    Program,
    Receive,
    Rope,
    RopeTable,
    Scale,
    SelectRows,
    Send,
    Softcap,
    Value,
)
from localllm.backends.torch_common import ops
from localllm.backends.torch_common.arithmetic import added, linear
from localllm.backends.torch_common.attention import Plan, attention
from localllm.backends.torch_common.kv_cache import LayerCache
from localllm.backends.torch_common.target import Target
from localllm.backends.torch_common.weights import Matrix, Weights


@dataclass
class Context:
    """One step's inputs on the device, and the values computed so far, by buffer."""

    ids: Tensor
    logit_rows: Tensor
    positions: Tensor  # on the target's `precise` device
    angles: dict[RopeTable, tuple[Tensor, Tensor]]
    plans: list[Plan]  # per KV group
    values: dict[int, Tensor]

    def read(self, value: Value) -> Tensor:
        return self.values[value.buffer][:, value.offset : value.offset + value.width]


Closure: TypeAlias = Callable[[Context], Tensor]


class Lowering:
    """Makes a closure of each op, which returns the op's output in float32.

    A device that has kernels of its own for an op overrides that op's method. `comm` reaches the
    other ranks, where the program is a part of one.
    """

    def __init__(
        self,
        target: Target,
        weights: Weights,
        caches: list[list[LayerCache]],
        comm: Communicator | None = None,
    ) -> None:
        self.target = target
        self.weights = weights
        self.caches = caches
        self.comm = comm

    def program(self, program: Program) -> list[Closure]:
        return [self.op(op) for op in program.ops]

    def op(self, op: Op) -> Closure:
        match op:
            case Embed():
                return self.embed(op)
            case Norm():
                return self.norm(op)
            case Linear():
                return self.linear(op)
            case Rope():
                return self.rope(op)
            case PositionScale():
                return self.position_scale(op)
            case Attention():
                return self.attention(op)
            case Moe():
                return self.moe(op)
            case Add():
                return lambda c: c.read(op.a) + c.read(op.b)
            case Scale():
                return lambda c: c.read(op.x) * op.factor
            case Softcap():
                return lambda c: ops.softcap(c.read(op.x), op.cap)
            case Activation():
                return lambda c: ops.activate(c.read(op.x), op.act)
            case ActMul():
                return lambda c: ops.activate(c.read(op.gate), op.act) * c.read(op.up)
            case SelectRows():
                return lambda c: c.read(op.x).index_select(0, c.logit_rows)
            case AllReduce():
                return self.all_reduce(op)
            case AllGather():
                return self.all_gather(op)
            case Receive():
                comm = self._ranks()
                return lambda c: comm.receive(len(c.ids), op.out.width)
            case Send():
                return self.send(op)

    def embed(self, op: Embed) -> Closure:
        matrix = self.weights.matrices[op.weight]
        if self.comm is None:
            return lambda c: matrix.gather(c.ids)

        def own_rows(c: Context) -> Tensor:
            rows = c.ids - op.first_row
            known = (rows >= 0) & (rows < matrix.rows)
            return torch.where(known[:, None], matrix.gather(torch.where(known, rows, 0)), 0.0)

        return own_rows

    def all_reduce(self, op: AllReduce) -> Closure:
        comm, widths = self._ranks(), [op.x.width] * op.ranks
        return lambda c: added(comm.gather(c.read(op.x), widths))

    def all_gather(self, op: AllGather) -> Closure:
        comm = self._ranks()
        return lambda c: torch.cat(comm.gather(c.read(op.x), op.widths), 1)

    def send(self, op: Send) -> Closure:
        comm = self._ranks()

        def run(c: Context) -> Tensor:
            x = c.read(op.x)
            comm.send(x)
            return x

        return run

    def _ranks(self) -> Communicator:
        if self.comm is None:
            raise ValueError("the program is one rank's part, and there are no other ranks")
        return self.comm

    def norm(self, op: Norm) -> Closure:
        weight, bias = self.weights.vector(op.weight), self.weights.vector(op.bias)
        return lambda c: ops.norm(
            c.read(op.x), weight, bias, eps=op.eps, kind=op.kind, group=op.group
        )

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """An `ops.Product`."""
        return linear(self.target, x, matrix)

    def linear(self, op: Linear) -> Closure:
        matrices = [self.weights.matrices[name] for name in op.weights]
        biases = [self.weights.vector(name) for name in op.biases]

        def run(c: Context) -> Tensor:
            x, parts = c.read(op.x), []
            for matrix, bias in zip(matrices, biases, strict=True):
                part = self.product(x, matrix)
                parts.append(part if bias is None else part + bias)
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

        return run

    def rope(self, op: Rope) -> Closure:
        def run(c: Context) -> Tensor:
            if op.table not in c.angles:
                c.angles[op.table] = ops.angles(self.target, c.positions, op.table)
            cos, sin = c.angles[op.table]
            return ops.rope(c.read(op.x), cos, sin, op.head_dim, op.table)

        return run

    def position_scale(self, op: PositionScale) -> Closure:
        def run(c: Context) -> Tensor:
            factors = ops.position_factors(
                self.target,
                c.positions,
                beta=op.beta,
                floor_scale=op.floor_scale,
                offset=op.offset,
            )
            return c.read(op.x) * factors

        return run

    def attention(self, op: Attention) -> Closure:
        cache = self.caches[op.group][op.layer]
        sinks = self.weights.vector(op.sinks)
        return lambda c: attention(
            op, c.read(op.q), c.read(op.k), c.read(op.v), sinks, cache, c.plans[op.group]
        )

    def moe(self, op: Moe) -> Closure:
        gate, up, down = (self.weights.matrices[n] for n in (op.gate, op.up, op.down))
        return lambda c: ops.moe(self.product, op, c.read(op.x), c.read(op.logits), gate, up, down)
