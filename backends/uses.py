"""Who reads each value of a program, and which ops may therefore share a kernel on any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from localllm.backends.program import Add, Attention, Linear, Op, Program, Rope, Value


def inputs(op: Op) -> Iterator[Value]:
    for part in fields(op):
        value = getattr(op, part.name)
        if part.name != "out" and isinstance(value, Value):
            yield value


class Uses:
    """Of the values of one program, by their buffers."""

    def __init__(self, program: Program) -> None:
        self._ops, self._logits = program.ops, program.logits
        self._made = {op.out.buffer: at for at, op in enumerate(program.ops)}
        self._readers: dict[int, list[Op]] = {}
        for op in program.ops:
            for value in inputs(op):
                self._readers.setdefault(value.buffer, []).append(op)

    def readers(self, value: Value) -> list[Op]:
        """An op that reads two windows of the buffer is there twice."""
        return self._readers.get(value.buffer, [])

    def residual(self, at: int, linear: Linear) -> Add | None:
        """The sum that the product of op number `at` goes into, if it is of no other use and the
        other side is known by then."""
        add = self._only_reader(linear.out)
        if not isinstance(add, Add) or linear.out not in (add.a, add.b):
            return None
        other = add.a if add.b == linear.out else add.b
        known = other.buffer != linear.out.buffer and self._made[other.buffer] < at
        return add if known else None

    def rotation(self, op: Attention) -> tuple[Rope, Rope] | None:
        """The ropes that make q and k and nothing else, of one table."""
        q, k = (self._ops[self._made[value.buffer]] for value in (op.q, op.k))
        if not (isinstance(q, Rope) and isinstance(k, Rope) and (q.out, k.out) == (op.q, op.k)):
            return None
        alone = self._only_reader(q.out) is op and self._only_reader(k.out) is op
        same = q.table == k.table and q.head_dim == k.head_dim == op.head_dim
        return (q, k) if alone and same else None

    def _only_reader(self, value: Value) -> Op | None:
        readers = self.readers(value)
        if self._logits and self._logits.buffer == value.buffer:
            return None
        return readers[0] if len(readers) == 1 else None
