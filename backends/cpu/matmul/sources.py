"""Where a tile's weights come from: the packed matrix, or scratch that many columns share.

An unpacked block holds some row blocks side by side. Every field is [item][row block]: scales
of sub-blocks, where there are any, pairs of a K-quant, the factors, then the quants
[sub-block][part][group].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from localllm.backends.cpu.matmul.dots import Dots, dots
from localllm.backends.cpu.matmul.emit import Emitter, Value, routine
from localllm.backends.cpu.matmul.k_quant import KQuant
from localllm.backends.cpu.matmul.layout import ROWS, VECTOR, FloatLayout, IntegerLayout, Layout
from localllm.backends.cpu.simd import Vector, i32x8

RUN = 8  # k of a float block that are unrolled

_PREFETCH = 4096  # bytes ahead
_HEAD_BYTES = 128  # the most that `KQuant.head` unpacks
_PART = 16  # how much more the next part of a quant counts


@dataclass(frozen=True)
class Fields:
    """Byte offsets in an unpacked block (scales are first), and its size."""

    vector: int  # bytes of one item of all row blocks
    pairs: int
    factors: int
    quants: int
    size: int

    @staticmethod
    def of(layout: IntegerLayout, kind: Dots, row_blocks: int) -> Fields:
        scales = layout.units * layout.subs * layout.parts(kind)
        pairs = scales if scales > 1 else 0
        factors = pairs + (layout.n_pairs if isinstance(layout, KQuant) else 0)
        quants = factors + layout.n_factors
        vector = VECTOR * row_blocks
        items = (pairs, factors, quants, quants + scales * layout.groups)
        return Fields(vector, *(vector * n for n in items))


class BlockSource(Protocol):
    """Quantized weights. Lists have one entry for each vector of rows."""

    lanes: int  # rows in a vector
    vectors: int
    units: int  # runs of a loop over a block

    def block(self, weights: Value, index: Value) -> Value:
        """Address of a block, which the other methods take."""

    def activations(self, x: Value, unit: Value) -> Value:
        """Address of a unit's activations, of a block's at x."""

    def groups(self, block: Value, unit: Value) -> Iterator[tuple[int, int, list[Value]]]:
        """Yields (item of the unit, see `IntegerLayout.unit`; k of a group in the unit; quants)."""

    def scale(self, block: Value, unit: Value, item: int) -> list[Value] | int:
        """For each row, as `Dots.flush` takes it."""

    def pair(self, block: Value, index: int) -> list[Value]: ...

    def factors(self, block: Value) -> list[list[Value]]: ...


class Packed:
    """Unpacks in registers; only the header of a K-quant block goes through memory."""

    lanes = 8
    vectors = 1

    def __init__(self, e: Emitter, layout: IntegerLayout, kind: Dots) -> None:
        self.e, self.layout, self.kind = e, layout, kind
        self.units, self.parts = layout.units, layout.parts(kind)
        self.sub_k = 4 * layout.groups
        self.buffer = e.buffer(_HEAD_BYTES)
        self.head = self.buffer

    def block(self, weights: Value, index: Value) -> Value:
        block = weights + index * self.layout.block_bytes
        if isinstance(self.layout, KQuant):
            self.head = self.layout.head(self.e, block, self.buffer)
        return block

    def activations(self, x: Value, unit: Value) -> Value:
        return x + unit * (self.layout.subs * self.sub_k)

    def groups(self, block: Value, unit: Value) -> Iterator[tuple[int, int, list[Value]]]:
        _prefetch_unit(self.e, self.layout, block, unit)
        for item, group, quants in self.layout.unit(self.e, self.kind, block, unit):
            yield item, item // self.parts * self.sub_k + 4 * group, [quants]

    def scale(self, block: Value, unit: Value, item: int) -> list[Value] | int:
        if isinstance(self.layout, KQuant):
            return [_item_scale(self.e, self.layout, self.kind, self.head, unit, item)]
        return _PART ** (item % self.parts)

    def pair(self, block: Value, index: int) -> list[Value]:
        assert isinstance(self.layout, KQuant)
        return [self.layout.pair(self.e, self.head, index)]

    def factors(self, block: Value) -> list[list[Value]]:
        return [[factor] for factor in self.layout.factors(self.e, block)]


class Unpacked:
    """Reads one chunk that `unpacker` wrote; a unit is one part of a sub-block."""

    def __init__(
        self, e: Emitter, layout: IntegerLayout, kind: Dots, row_blocks: int, lanes: int
    ) -> None:
        self.e, self.layout, self.lanes = e, layout, lanes
        self.vectors = row_blocks * ROWS // lanes
        self.parts = layout.parts(kind)
        self.units = layout.units * layout.subs * self.parts
        self.fields = Fields.of(layout, kind, row_blocks)

    def block(self, weights: Value, index: Value) -> Value:
        return weights + index * self.fields.size

    def activations(self, x: Value, unit: Value) -> Value:
        return x + (unit >> (self.parts - 1)) * (4 * self.layout.groups)  # parts are 1 or 2

    def groups(self, block: Value, unit: Value) -> Iterator[tuple[int, int, list[Value]]]:
        first = block + unit * (self.layout.groups * self.fields.vector)
        for group in range(self.layout.groups):
            at = self.fields.quants + group * self.fields.vector
            yield 0, 4 * group, self._vectors("i8", first, at)

    def scale(self, block: Value, unit: Value, item: int) -> list[Value] | int:
        if self.units == 1:
            return 1
        return self._vectors("i32", block + unit * self.fields.vector, 0)

    def pair(self, block: Value, index: int) -> list[Value]:
        return self._vectors("i16", block, self.fields.pairs + index * self.fields.vector)

    def factors(self, block: Value) -> list[list[Value]]:
        at, step = self.fields.factors, self.fields.vector
        return [self._vectors("f32", block, at + i * step) for i in range(self.layout.n_factors)]

    def _vectors(self, element: str, address: Value, offset: int) -> list[Value]:
        per_row = {"i8": 4, "i16": 2, "i32": 1, "f32": 1}[element]
        kind, step = Vector(element, self.lanes * per_row), self.lanes * 4
        return [self.e.load(kind, address, offset + v * step) for v in range(self.vectors)]


def _item_scale(
    e: Emitter, layout: KQuant, kind: Dots, head: Value, unit: Value, item: int
) -> Value:
    sub, part = divmod(item, layout.parts(kind))
    return kind.scale(layout.scale(e, head, unit, sub) * _PART**part)


def _prefetch_unit(e: Emitter, layout: IntegerLayout, block: Value, unit: Value) -> None:
    """Asks for what lies some way behind a unit in the row block."""
    unit_bytes = layout.block_bytes // layout.units
    for ahead in range(0, unit_bytes, 64):
        e.prefetch(block + unit * unit_bytes, _PREFETCH + ahead)


class FloatWeights(Protocol):
    lanes: int
    vectors: int

    def at(self, weights: Value, index: Value, run: Value) -> Value:
        """Address of one run of eight k of a block."""

    def load(self, address: Value, k: int) -> list[Value]: ...


class PackedFloats:
    lanes = 8
    vectors = 1

    def __init__(self, e: Emitter, layout: FloatLayout) -> None:
        self.e, self.layout = e, layout

    def at(self, weights: Value, index: Value, run: Value) -> Value:
        run_bytes = self.layout.block_bytes * RUN // self.layout.block
        address = weights + index * self.layout.block_bytes + run * run_bytes
        for ahead in range(0, run_bytes, 64):
            self.e.prefetch(address, _PREFETCH + ahead)
        return address

    def load(self, address: Value, k: int) -> list[Value]:
        return [self.layout.weights(self.e, address, k)]


class UnpackedFloats:
    def __init__(self, e: Emitter, layout: FloatLayout, row_blocks: int, lanes: int) -> None:
        self.e, self.layout, self.lanes = e, layout, lanes
        self.vectors = row_blocks * ROWS // lanes
        self.step = VECTOR * row_blocks

    def at(self, weights: Value, index: Value, run: Value) -> Value:
        return weights + (index * self.layout.block + run * RUN) * self.step

    def load(self, address: Value, k: int) -> list[Value]:
        kind = Vector("f32", self.lanes)
        return [
            self.e.load(kind, address, k * self.step + v * self.lanes * 4)
            for v in range(self.vectors)
        ]


def unpacked_bytes(layout: Layout, row_blocks: int) -> int:
    """Size of one unpacked block of so many row blocks."""
    if isinstance(layout, IntegerLayout):
        return Fields.of(layout, dots(), row_blocks).size
    return layout.block * VECTOR * row_blocks


def unpacker(layout: Layout, row_blocks: int) -> Any:
    """unpack(packed, scratch, blocks): one row block, into its column of the scratch area.

    `packed` is the row block at the chunk's first block; `scratch` the area's start, plus 32 for
    each row block before this one.
    """

    def write_quants(e: Emitter, packed: Value, scratch: Value, blocks: Value) -> None:
        assert isinstance(layout, IntegerLayout)
        kind = dots()
        fields = Fields.of(layout, kind, row_blocks)
        buffer = e.buffer(_HEAD_BYTES)
        with e.loop(blocks) as index:
            block = packed + index * layout.block_bytes
            out = scratch + index * fields.size
            _write_head(e, layout, kind, fields, block, buffer, out)
            for i, factor in enumerate(layout.factors(e, block)):
                e.store(factor, out, fields.factors + i * fields.vector)
            with e.loop(layout.units) as unit:
                _prefetch_unit(e, layout, block, unit)
                items = layout.subs * layout.parts(kind)
                first = out + unit * (items * layout.groups * fields.vector)
                for item, group, quants in layout.unit(e, kind, block, unit):
                    at = fields.quants + (item * layout.groups + group) * fields.vector
                    e.store(quants, first, at)

    def write_floats(e: Emitter, packed: Value, scratch: Value, blocks: Value) -> None:
        assert isinstance(layout, FloatLayout)
        source, out = PackedFloats(e, layout), UnpackedFloats(e, layout, row_blocks, 8)
        with e.loop(blocks) as index, e.loop(layout.block // RUN) as run:
            from_, to = source.at(packed, index, run), out.at(scratch, index, run)
            for k in range(RUN):
                e.store(source.load(from_, k)[0], to, k * out.step)

    return routine(3, write_quants if isinstance(layout, IntegerLayout) else write_floats)


def _write_head(
    e: Emitter,
    layout: IntegerLayout,
    kind: Dots,
    fields: Fields,
    block: Value,
    buffer: Value,
    out: Value,
) -> None:
    """Scales and pairs of a block, where its format has them."""
    if isinstance(layout, KQuant):
        head = layout.head(e, block, buffer)
        items = layout.subs * layout.parts(kind)
        with e.loop(layout.units) as unit:
            to = out + unit * (items * fields.vector)
            for item in range(items):
                scale = _item_scale(e, layout, kind, head, unit, item)
                e.store(scale, to, item * fields.vector)
        for i in range(layout.n_pairs):
            e.store(layout.pair(e, head, i), out, fields.pairs + i * fields.vector)
    elif fields.pairs:
        for part in range(layout.parts(kind)):
            e.store(kind.scale(e.splat(i32x8, _PART**part)), out, part * fields.vector)
