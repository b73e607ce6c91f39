"""Recording the ops of one program into another, some of whose buffers are narrower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from localllm.backends.parallel.layout import Intervals, length
from localllm.backends.program import Attention, KVGroup, KVLayer, Op, Program, Value


@dataclass(frozen=True)
class Window:
    """Columns of a buffer that ops read together, and what one rank has of them.

    `parts` are counted from the window's start. A part may come twice.
    """

    offset: int
    width: int
    parts: Intervals


class Rewriter:
    """`windows` are, by buffer, all that is kept of it, by rising offset; other buffers are whole.

    KV groups keep their numbers and may come out empty.
    """

    def __init__(
        self, source: Program, windows: Mapping[int, Sequence[Window]] | None = None
    ) -> None:
        self.program = Program(source.shapes)
        self.program.kv_groups = [KVGroup(group.window) for group in source.kv_groups]
        self._windows = windows or {}
        self._values: dict[int, Value] = {}  # by the source's buffers, all columns

    def windows(self, value: Value) -> Sequence[Window] | None:
        return self._windows.get(value.buffer)

    def out(self, value: Value) -> Value:
        """A buffer for all that is kept of the buffer of `value`."""
        windows = self.windows(value)
        width = value.width if windows is None else sum(length(w.parts) for w in windows)
        return self.program.new_value(width, value.rows)

    def bind(self, value: Value, made: Value) -> None:
        """From here on `made` stands for the source's `value`."""
        self._values[value.buffer] = made

    def read_all(self, value: Value) -> Value:
        """All that is kept of the buffer of `value`."""
        return self._values[value.buffer]

    def read(self, value: Value) -> Value:
        made = self._values[value.buffer]
        windows = self.windows(value)
        if windows is None:
            return replace(made, offset=made.offset + value.offset, width=value.width)
        at = made.offset
        for window in windows:
            if (window.offset, window.width) == (value.offset, value.width):
                return replace(made, offset=at, width=length(window.parts))
            at += length(window.parts)
        raise ValueError(f"{value} is not a window that the buffer is divided by")

    def op(self, op: Op, **changes: Any) -> None:
        """The same op on what stands for its inputs."""
        if isinstance(op, Attention):
            changes["layer"] = self._kv_layer(op)
        for name, value in _values(op).items():
            if name not in changes:
                changes[name] = self.read(value)
        if "out" not in changes:
            changes["out"] = self.out(op.out)
        made = replace(op, **changes)
        self.program.ops.append(made)
        self.bind(op.out, made.out)

    def _kv_layer(self, op: Attention) -> int:
        layers = self.program.kv_groups[op.group].layers
        kv_heads = self.read(op.k).width // op.head_dim
        layers.append(KVLayer(kv_heads, op.head_dim, op.value_dim))
        return len(layers) - 1


def _values(op: Op) -> dict[str, Value]:
    return {
        part.name: value
        for part in fields(op)
        if part.name != "out" and isinstance(value := getattr(op, part.name), Value)
    }


def inputs(op: Op) -> list[Value]:
    return list(_values(op).values())
