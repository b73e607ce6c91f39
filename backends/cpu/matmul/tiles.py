"""The inner loops: a few row blocks times a few columns, emitted unrolled.

A tile reads its weights either packed, and unpacks them in registers, for a few columns; or from
scratch, where `sources.unpacker` has written several row blocks ready to be multiplied, so that
many columns share that work. The arithmetic is the same to the last bit: sums within a block are
exact (of float weights: run over k in order), and the one float sum of each output runs over the
blocks in order, whatever the tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from localllm.backends.cpu.matmul import activations as act
from localllm.backends.cpu.matmul.dots import dots
from localllm.backends.cpu.matmul.emit import Emitter, Value, Variable, routine
from localllm.backends.cpu.matmul.k_quant import KQuant
from localllm.backends.cpu.matmul.layout import FloatLayout, IntegerLayout, Layout
from localllm.backends.cpu.matmul.shape import TileShape
from localllm.backends.cpu.matmul.sources import (
    RUN,
    BlockSource,
    FloatWeights,
    Packed,
    PackedFloats,
    Unpacked,
    UnpackedFloats,
)
from localllm.backends.cpu.matmul.sums import MemorySums, RegisterSums, Sums
from localllm.backends.cpu.simd import Vector


def packed_tile(layout: Layout, columns: int) -> Any:
    """tile(weights, activations, stride, sums, blocks) of one row block.

    Adds to the float32 sums [column][row] the products of `blocks` blocks at `weights` with
    columns whose records begin at `activations`, side by side; a column's next record is `stride`
    bytes on.
    """
    return routine(5, TileWriter(layout, columns, None))


def unpacked_tile(layout: Layout, columns: int, shape: TileShape) -> Any:
    """The same for one unpacked chunk; sums are [column][row block][row]."""
    return routine(5, TileWriter(layout, columns, shape))


class TileWriter:
    """Emits a tile: what `routine` calls. Without a shape it reads packed weights."""

    def __init__(self, layout: Layout, columns: int, shape: TileShape | None) -> None:
        self.layout, self.columns, self.shape = layout, columns, shape

    def __call__(
        self, e: Emitter, weights: Value, x: Value, stride: Value, sums: Value, blocks: Value
    ) -> None:
        tile = self._tile(e)
        memory = MemorySums(e, sums, tile.f32, len(tile.vectors))
        running: Sums = memory if self.shape else RegisterSums(memory, self.columns)
        in_chunk = act.CHUNK // self.layout.block
        with e.loop(1 if self.shape else e.quotient_up(blocks, in_chunk)) as chunk:
            record, first = x + chunk * stride, chunk * in_chunk
            with e.loop(1 if in_chunk == 1 else e.minimum(blocks - first, in_chunk)) as part:
                tile.add_block(weights, first + part, record, part, running)
        running.close()

    def _tile(self, e: Emitter) -> _Tile:
        layout, shape = self.layout, self.shape
        if isinstance(layout, FloatLayout):
            floats: FloatWeights = PackedFloats(e, layout)
            if shape:
                floats = UnpackedFloats(e, layout, shape.row_blocks, shape.lanes)
            return _FloatTile(e, floats, self.columns)
        assert isinstance(layout, IntegerLayout)
        source: BlockSource = Packed(e, layout, dots())
        if shape:
            source = Unpacked(e, layout, dots(), shape.row_blocks, shape.lanes)
        return (_KQuantTile if isinstance(layout, KQuant) else _LegacyTile)(
            e, layout, source, self.columns
        )


class _Tile(ABC):
    def __init__(self, e: Emitter, vectors: int, lanes: int, columns: int) -> None:
        self.e = e
        self.columns = range(columns)
        self.vectors = range(vectors)
        self.lanes = lanes
        self.f32, self.i32 = Vector("f32", lanes), Vector("i32", lanes)

    @abstractmethod
    def add_block(
        self, weights: Value, index: Value, record: Value, part: Value, sums: Sums
    ) -> None:
        """Adds block `index` of k, whose activations are the record's `part`-th block."""

    def zeros(self, kind: Vector) -> list[list[Variable]]:
        """Variables [column][vector]."""
        zero = self.e.splat(kind, 0)
        return [[self.e.variable(zero) for _ in self.vectors] for _ in self.columns]


class _IntegerTile(_Tile):
    def __init__(self, e: Emitter, layout: Any, source: BlockSource, columns: int) -> None:
        super().__init__(e, source.vectors, source.lanes, columns)
        self.layout = layout
        self.source = source
        self.dots = dots()
        # groups of a chain at most, 0 for no limit
        self.limit = layout.chain if self.dots.limits_chains else layout.narrow
        self.record = act.RECORD_BYTES[layout.activation]

    def totals(self, block: Value, x: Value) -> list[list[Value]]:
        """Sums of scale * quant * activation over a block, i32, [column][vector]."""
        totals = self.zeros(self.i32)
        with self.e.loop(self.source.units) as unit:
            at = self.source.activations(x, unit)
            chains: dict[int, _Chain] = {}
            for item, k, weights in self.source.groups(block, unit):
                chain = chains.setdefault(item, _Chain(len(self.columns), len(self.vectors)))
                self._add(chain, weights, at, k)
                full = chain.length == self.limit
                if full or chain.groups == self.layout.groups:
                    self._flush(chain, totals, self.source.scale(block, unit, item))
        return [[total.get() for total in column] for column in totals]

    def _add(self, chain: _Chain, weights: list[Value], x: Value, k: int) -> None:
        quants = Vector("i8", 4 * self.lanes)
        for column in self.columns:
            four = self.e.broadcast(quants, x, column * self.record + k)
            sums = chain.sums[column]
            sums[:] = [
                self.dots.add(self.e, s, w, four) for s, w in zip(sums, weights, strict=True)
            ]
        chain.length += 1
        chain.groups += 1

    def _flush(self, chain: _Chain, totals: list[list[Variable]], scale: list[Value] | int) -> None:
        for column in self.columns:
            for vector, total in enumerate(totals[column]):
                sums = chain.sums[column][vector]
                assert sums is not None
                factor = scale if isinstance(scale, int) else scale[vector]
                narrow = self.layout.narrow > 0
                total.set(self.dots.flush(self.e, total.get(), sums, factor, narrow))
        chain.clear()


class _Chain:
    """Sums that wait for their scale, [column][vector]."""

    def __init__(self, columns: int, vectors: int) -> None:
        self.sums: list[list[Value | None]] = [[None] * vectors for _ in range(columns)]
        self.length = 0  # groups since the last flush
        self.groups = 0  # of the sub-block so far

    def clear(self) -> None:
        for column in self.sums:
            column[:] = [None] * len(column)
        self.length = 0


class _KQuantTile(_IntegerTile):
    def add_block(
        self, weights: Value, index: Value, record: Value, part: Value, sums: Sums
    ) -> None:
        block = self.source.block(weights, index)
        totals = self.totals(block, record)
        pairs = [self.source.pair(block, i) for i in range(self.layout.n_pairs)]
        factors = self.source.factors(block)
        for column in self.columns:
            scale = self.e.broadcast(self.f32, record, column * self.record + act.SCALE)
            offsets = self._offsets(pairs, record, column)
            for v in self.vectors:
                of_rows = [factor[v] for factor in factors]
                value = self.layout.combine(
                    self.e, self.dots, totals[column][v], offsets[v], of_rows
                )
                sums.set(column, v, self.e.fma(scale, value, sums.get(column, v)))

    def _offsets(self, pairs: list[list[Value]], x: Value, column: int) -> list[Value]:
        """Sum over pairs * sums of activations, for each vector."""
        at = column * self.record + self.layout.sums
        kind = Vector("i16", 2 * self.lanes)
        xs = [self.e.broadcast(kind, x, at + 4 * i) for i in range(len(pairs))]
        result = []
        for v in self.vectors:
            total = self.e.splat(self.i32, 0)
            for pair, sums in zip(pairs, xs, strict=True):
                total = self.dots.add_pairs(self.e, total, pair[v], sums)
            result.append(total)
        return result


class _LegacyTile(_IntegerTile):
    def add_block(
        self, weights: Value, index: Value, record: Value, part: Value, sums: Sums
    ) -> None:
        block = self.source.block(weights, index)
        totals = self.totals(block, record + part * 32)
        factors = self.source.factors(block)
        for column in self.columns:
            x = record + (part * 4 + column * self.record)
            self._finish(totals[column], factors, x, sums, column)

    def _finish(
        self, totals: list[Value], factors: list[list[Value]], x: Value, sums: Sums, column: int
    ) -> None:
        """Adds one block's product of one column."""
        e = self.e
        scale = e.broadcast(self.f32, x, act.SCALES)
        if (bits := self.layout.excess(self.dots)) is not None:
            excess = e.broadcast(self.i32, x, act.SUMS) << bits
            totals = [total - excess for total in totals]
        for v in self.vectors:
            value = e.fma(factors[0][v] * scale, e.to_f32(totals[v]), sums.get(column, v))
            if len(factors) == 2:
                value = e.fma(factors[1][v], e.broadcast(self.f32, x, act.SCALED_SUMS), value)
            sums.set(column, v, value)


class _FloatTile(_Tile):
    def __init__(self, e: Emitter, source: FloatWeights, columns: int) -> None:
        super().__init__(e, source.vectors, source.lanes, columns)
        self.source = source

    def add_block(
        self, weights: Value, index: Value, record: Value, part: Value, sums: Sums
    ) -> None:
        e, first = self.e, record + part * 128
        products = self.zeros(self.f32)
        with e.loop(32 // RUN) as run:
            at, x = self.source.at(weights, index, run), first + run * (RUN * 4)
            for k in range(RUN):
                vectors = self.source.load(at, k)
                for column in self.columns:
                    one = e.broadcast(self.f32, x, column * act.RECORD_BYTES["f32"] + 4 * k)
                    for v in self.vectors:
                        product = products[column][v]
                        product.set(e.fma(vectors[v], one, product.get()))
        for column in self.columns:
            for v in self.vectors:
                sums.set(column, v, sums.get(column, v) + products[column][v].get())
