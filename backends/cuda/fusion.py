"""Which ops of a program share a kernel, and in which type each value is kept.

A matmul adds the residual, or multiplies its halves, the first activated. Queries and keys are
rotated where keys are stored. Fusing changes who computes a value, never how: results have the same
bits as those of the ops one by one (`NONE`).

Norms, activations and attention write what only matrices read in the type that these multiply in,
so that no pass over memory does nothing but a cast. That holds with and without fusions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
from localllm.backends.uses import Uses, inputs


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
        self._uses = Uses(program)
        self._narrow = narrow_buffers(program)

    def find(self) -> Fusions:
        residuals: dict[Value, Add] = {}
        gates: dict[Value, ActMul] = {}
        rotations: dict[Value, tuple[Rope, Rope]] = {}
        absorbed: set[Value] = set()
        for at, op in enumerate(self._ops):
            match op:
                case Linear():
                    if add := self._uses.residual(at, op):
                        residuals[op.out] = add
                        absorbed.add(add.out)
                    elif product := self._gated(op):
                        gates[op.out] = product
                        absorbed.add(product.out)
                case Attention():
                    if pair := self._uses.rotation(op):
                        rotations[op.out] = pair
                        absorbed |= {rope.out for rope in pair}
        return Fusions(residuals, gates, rotations, frozenset(absorbed))

    def _gated(self, linear: Linear) -> ActMul | None:
        """The product of the halves, if they are of no other use and all is kept in one type."""
        readers = self._uses.readers(linear.out)
        if len(readers) != 2 or readers[0] is not readers[1]:
            return None
        op, half = readers[0], linear.out.width // 2
        if not isinstance(op, ActMul) or not self._narrow >= {linear.out.buffer, op.out.buffer}:
            return None
        places = [(value.offset, value.width) for value in (op.gate, op.up)]
        return op if places == [(0, half), (half, half)] else None
