"""What of a program each tensor rank can do for columns of its own.

A region lies between linears whose rows are cut and one whose columns are: heads of an attention,
or columns of a feed-forward. All between them reads and writes nothing but the rank's own columns.
"""

from __future__ import annotations

from typing import TypeAlias

from localllm.backends.parallel.layout import (
    Interval,
    Intervals,
    joined,
    kv_heads_of,
    scaled,
    shifted,
)
from localllm.backends.parallel.rewrite import Window, inputs
from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    Attention,
    Linear,
    Norm,
    Op,
    PositionScale,
    Program,
    Rope,
    Scale,
    SelectRows,
    Softcap,
    Value,
)

# Their output's columns come of the same columns of their inputs.
_COLUMNWISE = (Activation, ActMul, Add, Norm, PositionScale, Rope, Scale, SelectRows, Softcap)

Region: TypeAlias = dict[int, list[Window]]
"""By buffer, what one rank has of it, by rising offset."""


class IndivisibleError(Exception):
    """Columns cannot be kept apart; the message says why."""


class Flow:
    """Who makes and who reads the values of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[int, tuple[int, Op]] = {
            op.out.buffer: (at, op) for at, op in enumerate(program.ops)
        }
        self._readers: dict[int, list[Op]] = {}
        for op in program.ops:
            for buffer in {value.buffer for value in inputs(op)}:
                self._readers.setdefault(buffer, []).append(op)

    def readers(self, value: Value) -> list[Op]:
        return self._readers.get(value.buffer, [])

    def attention_before(self, x: Value) -> Attention | None:
        """Whose heads the columns of x are."""
        _, op = self._made[x.buffer]
        if isinstance(op, Attention):
            return op
        if not isinstance(op, _COLUMNWISE):
            return None
        found = (self.attention_before(value) for value in inputs(op))
        return next((attention for attention in found if attention), None)

    def region(self, end: Linear, share: Interval) -> Region:
        """All that a rank needs of other values to have columns `share` of the input of `end`."""
        region: Region = {}
        _need(region, end.x, (share,))
        last, _ = self._made[end.x.buffer]
        for op in reversed(self._program.ops[: last + 1]):
            if op.out.buffer in region:
                _need_inputs(region, op)
        self._check_readers(region, end)
        return region

    def _check_readers(self, region: Region, end: Linear) -> None:
        logits = self._program.logits
        for buffer in region:
            for op in self._readers.get(buffer, []):
                inside = op.out.buffer in region and not isinstance(op, Linear)
                if op is not end and not inside:
                    raise IndivisibleError(f"{type(op).__name__} reads other ranks' columns too")
            if logits and logits.buffer == buffer:
                raise IndivisibleError("its columns are the program's result")


def _need(region: Region, value: Value, parts: Intervals) -> None:
    """Adds a window to what is kept of a buffer."""
    window = Window(value.offset, value.width, joined(parts))
    windows = region.setdefault(value.buffer, [])
    if window in windows:
        return
    end = window.offset + window.width
    if any(w.offset < end and window.offset < w.offset + w.width for w in windows):
        raise IndivisibleError("operations want different columns of one value")
    windows.append(window)
    windows.sort(key=lambda w: w.offset)


def _need_inputs(region: Region, op: Op) -> None:
    windows = region[op.out.buffer]
    kept = joined(part for w in windows for part in shifted(w.parts, w.offset))
    match op:
        case Linear(shard="column"):
            return
        case Attention():
            _need_heads(region, op, kept)
        case Norm(group=width) | Rope(head_dim=width) if any(
            border % width for part in kept for border in part
        ):
            raise IndivisibleError(f"{type(op).__name__} is of runs of {width} columns")
        case _ if isinstance(op, _COLUMNWISE):
            for value in inputs(op):
                _need(region, value, kept)
        case _:
            raise IndivisibleError(f"{type(op).__name__} makes all columns at once")


def _need_heads(region: Region, op: Attention, kept: Intervals) -> None:
    """Query heads with the KV heads that they read."""
    if len(kept) != 1 or any(border % op.value_dim for border in kept[0]):
        raise IndivisibleError("a head would be cut")
    start, end = kept[0]
    share = start // op.value_dim, end // op.value_dim
    kv_heads = op.k.width // op.head_dim
    read = kv_heads_of(share, op.q.width // op.head_dim, kv_heads)
    single = [(head, head + 1) for head in read]
    _need(region, op.q, scaled([share], op.head_dim))
    _need(region, op.k, scaled(single, op.head_dim))
    _need(region, op.v, scaled(single, op.value_dim))
