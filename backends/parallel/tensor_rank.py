"""One tensor rank's part of a program, with the collectives that make it whole again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from localllm.backends.parallel.division import Division
from localllm.backends.parallel.layout import Interval, Intervals, divided, joined, shifted
from localllm.backends.parallel.rewrite import Rewriter
from localllm.backends.parallel.slices import Slice
from localllm.backends.program import (
    AllGather,
    AllReduce,
    Attention,
    Embed,
    Linear,
    Moe,
    Norm,
    Op,
    Program,
    Value,
)


def part_of(program: Program, division: Division, rank: int) -> tuple[Program, dict[str, Slice]]:
    """The program of one rank, and what it calls the parts of weights that it has."""
    sharder = _Sharder(program, division, rank)
    for op in program.ops:
        sharder.shard(op)
    own = sharder.program
    if program.logits:
        own.finish(sharder.read(program.logits))
    own.shapes = {name: cut.shape(program.shapes[cut.name]) for name, cut in sharder.slices.items()}
    return own, sharder.slices


class _Sharder(Rewriter):
    def __init__(self, source: Program, division: Division, rank: int) -> None:
        super().__init__(source, division.regions[rank])
        self._shapes = source.shapes
        self._division, self._rank = division, rank
        self.slices: dict[str, Slice] = {}

    def shard(self, op: Op) -> None:
        match op:
            case Embed():
                self._embed(op)
            case Norm():
                kept = self._kept(op.out)
                weight, bias = (self._norm_vector(n, op, kept) for n in (op.weight, op.bias))
                self.op(op, weight=weight, bias=bias)
            case Linear():
                self._linear(op)
            case Attention():
                self.op(op, sinks=self._sinks(op))
            case Moe():
                self._moe(op)
            case _:
                self.op(op)

    def _embed(self, op: Embed) -> None:
        shares = self._division.rows.get(op.out)
        if shares is None:
            self.op(op, weight=self._slice(op.weight))
            return
        first, end = shares[self._rank]
        self.op(op, weight=self._slice(op.weight, -2, ((first, end),)), first_row=first)
        self._sum(op.out)

    def _norm_vector(self, name: str | None, op: Norm, kept: Intervals | None) -> str | None:
        """Of as many entries as there are columns, or of a run's, which all runs share."""
        if name is None:
            return None
        shape = self._shapes[name]
        if kept is None or prod(shape) != op.x.width:
            return self._slice(name)
        run = prod(shape[1:])  # some files have one vector a head
        return self._slice(name, -len(shape), tuple((a // run, b // run) for a, b in kept))

    def _sinks(self, op: Attention) -> str | None:
        kept = self._kept(op.out)
        if op.sinks is None or kept is None:
            return op.sinks and self._slice(op.sinks)
        heads = tuple((a // op.value_dim, b // op.value_dim) for a, b in kept)
        return self._slice(op.sinks, -1, heads)

    def _linear(self, op: Linear) -> None:
        division = self._division
        changes = {}
        if op.out in division.gathered:
            changes["x"] = self._gather(self.read(op.x), division.gathered[op.out])
        kept = self._kept(op.out)
        if op.out in division.summed:
            own = division.summed[op.out][self._rank]
            biases = op.biases if self._rank == 0 else (None,) * len(op.biases)
            self.op(
                op,
                weights=tuple(self._slice(name, -1, (own,)) for name in op.weights),
                biases=tuple(name and self._slice(name) for name in biases),
            )
            self._sum(op.out)
        elif op.out in division.rows:
            shares = division.rows[op.out]
            own = shares[self._rank]
            changes["out"] = self.program.new_value(own[1] - own[0], op.out.rows)
            self.op(op, **self._rows(op, (own,)), **changes)
            self.bind(op.out, self._gather(self.read_all(op.out), shares))
        else:
            everything = ((0, op.out.width),)
            self.op(op, **self._rows(op, everything if kept is None else kept), **changes)

    def _rows(self, op: Linear, kept: Intervals) -> dict[str, tuple[str | None, ...]]:
        """Weights and biases that make the columns `kept` of the output."""
        widths = [self._shapes[name][0] for name in op.weights]
        weights, biases = [], []
        for number, parts in groupby(divided(kept, widths), key=lambda part: part[0]):
            rows = joined(interval for _, interval in parts)
            bias = op.biases[number]
            weights.append(self._slice(op.weights[number], -2, rows))
            biases.append(bias and self._slice(bias, -1, rows))
        return {"weights": tuple(weights), "biases": tuple(biases)}

    def _moe(self, op: Moe) -> None:
        shares = self._division.summed.get(op.out)
        own = (shares[self._rank],) if shares else ()
        self.op(
            op,
            gate=self._slice(op.gate, -2, own),
            up=self._slice(op.up, -2, own),
            down=self._slice(op.down, -1, own),
        )
        if shares:
            self._sum(op.out)

    def _sum(self, value: Value) -> None:
        x = self.read_all(value)
        out = self.program.new_value(x.width, x.rows)
        self.program.ops.append(AllReduce(out, x, self._division.ranks))
        self.bind(value, out)

    def _gather(self, x: Value, shares: Sequence[Interval]) -> Value:
        widths = tuple(end - start for start, end in shares)
        out = self.program.new_value(sum(widths), x.rows)
        self.program.ops.append(AllGather(out, x, widths))
        return out

    def _kept(self, out: Value) -> Intervals | None:
        """Columns of an op's output that this rank has; None for all."""
        windows = self.windows(out)
        if windows is None:
            return None
        return joined(part for w in windows for part in shifted(w.parts, w.offset))

    def _slice(self, name: str, axis: int = -1, parts: Intervals = ()) -> str:
        """What the rank's program calls these parts."""
        shape = self._shapes[name]
        cut = Slice(name) if parts in ((), ((0, shape[axis]),)) else Slice(name, axis, parts)
        own, count = name, 1
        while self.slices.setdefault(own, cut) != cut or (own != name and own in self._shapes):
            count += 1
            own = f"{name}#{count}"
        return own
