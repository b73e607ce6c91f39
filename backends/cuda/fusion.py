"""Which ops of a program share a kernel, and in which type each value is kept.

A matmul adds the residual, or multiplies its halves, the first activated. Queries and keys are
rotated where keys are stored. Fusing changes who computes a value, never how: results have the same
bits as those of the ops one by one (`NONE`).

Norms, activations and attention write what only matrices read in the type that these multiply in,
so that no pass over memory does nothing but a cast. That holds with and without fusions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    Attention,
    Linear,
    Moe,
    Op,
    Program,
    Rope,
    SelectRows,
    Value,
)


@dataclass(frozen=True)
class Fusions:
    """Keys are the outputs of ops."""

    residuals: Mapping[Value, Add] = field(default_factory=dict)  # of Linear
    gates: Mapping[Value, ActMul] = field(default_factory=dict)  # of Linear
    rotations: Mapping[Value, tuple[Rope, Rope]] = field(default_factory=dict)  # q, k of Attention
    absorbed: frozenset[Value] = frozenset()  # need no work of their own


NONE = Fusions()


def find_fusions(program: Program) -> Fusions:
    return _Finder(program).find()


def narrow_buffers(program: Program) -> frozenset[int]:
    """Those kept in the type of the products: nobody reads them more precisely."""
    precise = {program.logits.buffer} if program.logits else set()
    routers, read = program.routers(), set()
    for op in reversed(program.ops):  # readers come after the op whose output they read
        for value in inputs(op):
            read.add(value.buffer)
            if not _is_rounded(op, value, routers, op.out.buffer not in precise):
                precise.add(value.buffer)
    return frozenset(read - precise)


def inputs(op: Op) -> Iterator[Value]:
    for part in fields(op):
        value = getattr(op, part.name)
        if part.name != "out" and isinstance(value, Value):
            yield value


def _is_rounded(op: Op, value: Value, routers: set[str], narrow_out: bool) -> bool:
    """Whether the op rounds this input to the type of the products anyway, or may."""
    match op:
        case Linear():
            return not routers.intersection(op.weights)
        case Moe():
            return value != op.logits
        case Attention():
            return value.buffer not in (op.k.buffer, op.v.buffer)
        case ActMul() | Activation():
            return True
        case SelectRows():
            return narrow_out
        case _:
            return False


class _Finder:
    def __init__(self, program: Program) -> None:
        self._ops = program.ops
        self._made = {op.out.buffer: at for at, op in enumerate(program.ops)}
        self._readers: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in inputs(op):
                self._readers.setdefault(value.buffer, []).append(op)
        self._logits = program.logits
        self._narrow = narrow_buffers(program)

    def find(self) -> Fusions:
        residuals: dict[Value, Add] = {}
        gates: dict[Value, ActMul] = {}
        rotations: dict[Value, tuple[Rope, Rope]] = {}
        absorbed: set[Value] = set()
        for at, op in enumerate(self._ops):
            match op:
                case Linear():
                    if add := self._residual(at, op):
                        residuals[op.out] = add
                        absorbed.add(add.out)
                    elif product := self._gated(op):
                        gates[op.out] = product
                        absorbed.add(product.out)
                case Attention():
                    if pair := self._rotation(op):
                        rotations[op.out] = pair
                        absorbed |= {rope.out for rope in pair}
        return Fusions(residuals, gates, rotations, frozenset(absorbed))

    def _residual(self, at: int, linear: Linear) -> Add | None:
        """The sum that the product goes into, if it is of no other use."""
        add = self._only_reader(linear.out)
        if not isinstance(add, Add) or linear.out not in (add.a, add.b):
            return None
        other = add.a if add.b == linear.out else add.b
        known = other.buffer != linear.out.buffer and self._made[other.buffer] < at
        return add if known else None

    def _gated(self, linear: Linear) -> ActMul | None:
        """The product of the halves, if they are of no other use and all is kept in one type."""
        readers = self._readers.get(linear.out.buffer, [])
        if len(readers) != 2 or readers[0] is not readers[1]:
            return None
        op, half = readers[0], linear.out.width // 2
        if not isinstance(op, ActMul) or not self._narrow >= {linear.out.buffer, op.out.buffer}:
            return None
        places = [(value.offset, value.width) for value in (op.gate, op.up)]
        return op if places == [(0, half), (half, half)] else None

    def _rotation(self, op: Attention) -> tuple[Rope, Rope] | None:
        """The ropes that make q and k and nothing else, of one table."""
        q, k = (self._ops[self._made[value.buffer]] for value in (op.q, op.k))
        if not (isinstance(q, Rope) and isinstance(k, Rope) and (q.out, k.out) == (op.q, op.k)):
            return None
        alone = self._only_reader(q.out) is op and self._only_reader(k.out) is op
        same = q.table == k.table and q.head_dim == k.head_dim == op.head_dim
        return (q, k) if alone and same else None

    def _only_reader(self, value: Value) -> Op | None:
        readers = self._readers.get(value.buffer, [])
        if self._logits and self._logits.buffer == value.buffer:
            return None
        return readers[0] if len(readers) == 1 else None
