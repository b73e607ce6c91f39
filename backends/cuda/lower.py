"""From the ops of a program to work for the GPU.

Nothing here waits for the device, and what is launched depends on the shape of the step alone, so
that the work of a step can be recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from localllm.backends.cuda import fast
from localllm.backends.cuda.fusion import Fusions, narrow_buffers
from localllm.backends.cuda.inputs import Forward
from localllm.backends.cuda.kernels import elementwise
from localllm.backends.cuda.kernels.attention import AttentionShape, attend, n_splits
from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import PackedWeight
from localllm.backends.cuda.kernels.matmul import matmul
from localllm.backends.cuda.kernels.moe import moe
from localllm.backends.cuda.kernels.norm import norm
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import Angles, angles, rope, rope_and_store, store
from localllm.backends.cuda.ranks import between_ranks
from localllm.backends.cuda.weights import Weights
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
from localllm.backends.uses import inputs

# Splits of the attention run side by side as long as what they leave is no more than this.
MOST_SPLIT_BYTES = 256 << 20


@dataclass(frozen=True)
class Kept:
    """How values are kept: the type of each buffer, and where the logits go."""

    narrow: frozenset[int]
    dtype: torch.dtype
    logits_buffer: int | None
    logits: Tensor  # [most rows, vocab] float32


@dataclass
class Context:
    """One step's inputs, and the values computed so far, by buffer."""

    forward: Forward
    kept: Kept
    comm: Communicator | None = None  # to the other ranks, where the program is a part of one
    values: dict[int, Tensor] = field(default_factory=dict)

    def read(self, value: Value) -> Tensor:
        return self.values[value.buffer][:, value.offset : value.offset + value.width]

    def new(self, value: Value) -> Tensor:
        """Room for an op's output."""
        shape, kept = self.forward.shape, self.kept
        rows = shape.tokens if value.rows == "T" else shape.rows
        if value.buffer == kept.logits_buffer:
            out = kept.logits[:rows]
        else:
            dtype = kept.dtype if value.buffer in kept.narrow else torch.float32
            device = self.forward.ids.device
            out = torch.empty((rows, value.width), dtype=dtype, device=device)
        self.values[value.buffer] = out
        return out


Closure: TypeAlias = Callable[[Context], None]


@dataclass(frozen=True)
class Work:
    """`run` computes the value `out`; what is `dying` is not read after it."""

    run: Closure
    out: Value
    dying: tuple[int, ...]


def is_divided(program: Program) -> bool:
    """Whether it is one rank's part of a program."""
    return any(isinstance(op, AllReduce | AllGather | Receive | Send) for op in program.ops)


class Lowering:
    """Makes closures of a program's ops. `positions`: how many a sequence may have."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        caches: list[list[PagedCache]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        positions: int,
        logit_rows: int,
        fast: bool = False,
    ) -> None:
        self._program = program
        self._weights = weights
        self._caches = caches
        self._dtype = dtype
        self._device = device
        self._positions = positions
        self._fast = fast
        self._routers = program.routers()
        self._angles: dict[RopeTable, Angles] = {}
        logits = program.logits
        width = logits.width if logits else 0
        self.kept = Kept(
            narrow_buffers(program),
            dtype,
            logits.buffer if logits else None,
            torch.zeros((logit_rows, width), dtype=torch.float32, device=device),
        )

    def lower(self, fusions: Fusions) -> list[Work]:
        """In the order of the ops; those that a fusion absorbs have no work of their own."""
        work: list[tuple[Op, Closure, set[int]]] = []
        for op in self._program.ops:
            if op.out in fusions.absorbed:
                continue
            reads = {value.buffer for value in inputs(op)}
            if isinstance(op, Linear) and (add := fusions.residuals.get(op.out)):
                other = add.a if add.b == op.out else add.b
                work.append((add, self._linear(op, add.out, other), reads | {other.buffer}))
            elif isinstance(op, Linear) and (product := fusions.gates.get(op.out)):
                work.append((product, self._gated(op, product), reads))
            elif isinstance(op, Attention) and (pair := fusions.rotations.get(op.out)):
                before = {rope.x.buffer for rope in pair}
                work.append((op, self._attention(op, pair), before | {op.v.buffer}))
            else:
                work.append((op, self._closure(op), reads))
        return self._with_ends(work)

    def _with_ends(self, work: list[tuple[Op, Closure, set[int]]]) -> list[Work]:
        needed = {self._program.logits.buffer} if self._program.logits else set()
        result = []
        for op, run, reads in reversed(work):
            used = reads | {op.out.buffer}
            result.append(Work(run, op.out, tuple(used - needed)))
            needed |= used
        return result[::-1]

    def _closure(self, op: Op) -> Closure:
        match op:
            case Embed():
                return self._embed(op)
            case Norm():
                return self._norm(op)
            case Linear():
                return self._linear(op, op.out, None)
            case Rope():
                return self._rope(op)
            case PositionScale():
                return self._position_scale(op)
            case Attention():
                return self._attention(op, None)
            case Moe():
                return self._moe(op)
            case Add():
                return lambda c: elementwise.add(c.read(op.a), c.read(op.b), c.new(op.out))
            case Activation():
                return lambda c: elementwise.activation(c.read(op.x), c.new(op.out), op.act)
            case ActMul():
                return lambda c: elementwise.act_mul(
                    c.read(op.gate), c.read(op.up), c.new(op.out), op.act
                )
            case Scale():
                return _stored(op.out, lambda c: c.read(op.x) * op.factor)
            case Softcap():
                return _stored(op.out, lambda c: ops.softcap(c.read(op.x), op.cap))
            case SelectRows():
                return _stored(op.out, lambda c: c.read(op.x).index_select(0, c.forward.logit_rows))
            case AllReduce() | AllGather() | Receive() | Send():
                return _stored(op.out, between_ranks(op))

    def _embed(self, op: Embed) -> Closure:
        matrix = self._weights.matrices[op.weight]
        if not is_divided(self._program):
            return lambda c: embed(c.forward.ids, matrix, c.new(op.out))

        def own_rows(c: Context) -> None:
            rows, out = c.forward.ids - op.first_row, c.new(op.out)
            known = (rows >= 0) & (rows < matrix.rows)
            embed(torch.where(known, rows, 0), matrix, out)
            out.masked_fill_(~known[:, None], 0.0)

        return own_rows

    def _norm(self, op: Norm) -> Closure:
        weight, bias = self._weights.vector(op.weight), self._weights.vector(op.bias)
        return lambda c: norm(
            c.read(op.x), weight, bias, c.new(op.out), eps=op.eps, kind=op.kind, group=op.group
        )

    def _linear(self, op: Linear, target: Value, residual: Value | None) -> Closure:
        """Into `target`, with the residual added."""
        multiply = self._product(op)

        def run(c: Context) -> None:
            other = None if residual is None else c.read(residual)
            multiply(c.read(op.x), c.new(target), other)

        return run

    def _gated(self, op: Linear, product: ActMul) -> Closure:
        """The product of the halves, by the matmul itself where both are one matrix."""
        products, dtype = self._weights.products[op.weights], self._dtype
        if len(products) == 1:
            (weight,), (bias,) = products, self._biases(op, products)
            multiply = fast.matmul if self._fast else matmul
            return lambda c: multiply(
                c.read(op.x).to(dtype), weight, c.new(product.out), bias=bias, act=product.act
            )
        parts, half = self._product(op), product.out.width

        def run(c: Context) -> None:
            x = c.read(op.x)
            both = torch.empty((len(x), op.out.width), dtype=dtype, device=x.device)
            parts(x, both, None)
            gate, up = both[:, :half], both[:, half:]
            elementwise.act_mul(gate, up, c.new(product.out), product.act)

        return run

    def _product(self, op: Linear) -> Callable[[Tensor, Tensor, Tensor | None], None]:
        """Takes x, the output and the residual."""
        products = self._weights.products[op.weights]
        biases = self._biases(op, products)
        precise = bool(self._routers.intersection(op.weights))
        dtype = torch.float32 if precise else self._dtype
        multiply = fast.matmul if self._fast and not precise else matmul

        def run(x: Tensor, out: Tensor, other: Tensor | None) -> None:
            x, first = x.to(dtype), 0
            for weight, bias in zip(products, biases, strict=True):
                last = first + weight.rows
                part = None if other is None else other[:, first:last]
                multiply(x, weight, out[:, first:last], bias=bias, residual=part)
                first = last

        return run

    def _biases(self, op: Linear, products: list[PackedWeight]) -> list[Tensor | None]:
        """Of each product, whose matrix may be that of several weights."""
        if not any(op.biases):
            return [None] * len(products)
        parts = []
        for name, bias in zip(op.weights, op.biases, strict=True):
            rows = self._program.shapes[name][0]
            vector = self._weights.vector(bias)
            parts.append(torch.zeros(rows, device=self._device) if vector is None else vector)
        return list(torch.split(torch.cat(parts), [weight.rows for weight in products]))

    def _rope(self, op: Rope) -> Closure:
        table = self._table(op.table)
        return lambda c: rope(c.read(op.x), c.new(op.out), c.forward.positions, table, op.head_dim)

    def _table(self, table: RopeTable) -> Angles:
        if table not in self._angles:
            self._angles[table] = angles(table, self._positions, self._device)
        return self._angles[table]

    def _position_scale(self, op: PositionScale) -> Closure:
        at = torch.arange(self._positions, dtype=torch.float64)
        steps = torch.floor((at + op.offset) / op.floor_scale)
        factors = (1 + op.beta * torch.log1p(steps)).float()[:, None].to(self._device)
        return _stored(
            op.out, lambda c: c.read(op.x) * factors.index_select(0, c.forward.positions)
        )

    def _attention(self, op: Attention, ropes: tuple[Rope, Rope] | None) -> Closure:
        cache, group = self._caches[op.group][op.layer], op.group
        heads = op.q.width // op.head_dim
        shape = AttentionShape(heads, op.scale, op.window, op.softcap)
        ratio = heads // cache.kv_heads
        sinks = self._weights.vector(op.sinks)
        split_bytes = 4 * heads * (op.value_dim + 2)
        dtype = self._dtype
        table = self._table(ropes[0].table) if ropes else None

        def stored(c: Context) -> Tensor:
            """The queries as they are multiplied."""
            f, v = c.forward, c.read(op.v)
            if ropes is None or table is None:
                store(c.read(op.k), v, cache, f.slots[group])
                return c.read(op.q).to(dtype)
            q, k = (c.read(rope.x) for rope in ropes)
            turned = torch.empty(q.shape, dtype=dtype, device=q.device)
            rope_and_store(q, k, v, turned, cache, f.positions, f.slots[group], table)
            return turned

        def run(c: Context) -> None:
            f, q = c.forward, stored(c)
            splits = n_splits(f.shape.context)
            few = splits > 1 and len(q) * splits * split_bytes <= MOST_SPLIT_BYTES
            attend(
                shape,
                q,
                cache,
                c.new(op.out),
                block_table=f.tables[group],
                positions=f.positions,
                tiles=f.tiles[ratio],
                sinks=sinks,
                side_by_side=splits if few else 0,
            )

        return run

    def _moe(self, op: Moe) -> Closure:
        gate, up, down = (self._weights.matrices[n] for n in (op.gate, op.up, op.down))
        return lambda c: moe(
            c.read(op.x).to(self._dtype),
            c.read(op.logits),
            gate,
            up,
            down,
            c.new(op.out),
            used=op.used,
            act=op.act,
            gating=op.gating,
            normalize=op.normalize,
            scale=op.scale,
        )


def _stored(out: Value, compute: Callable[[Context], Tensor]) -> Closure:
    """Of an op that torch has."""

    def run(c: Context) -> None:
        c.new(out).copy_(compute(c))

    return run
