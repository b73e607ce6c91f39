"""How weights lie in memory, and what a format has to say about itself.

Rows are taken eight at a time: a *row block*. Along k a row block is a sequence of *blocks* of
the format's own length, 32 or 256 k, each of the size of eight blocks of the GGUF file. Within a
block the quants of four neighbouring k form a *group*: 32 bytes, of which row r has 4r to 4r+3.

    one group of a row block    row 0        row 1              row 7
                             k k+1 k+2 k+3 | k k+1 k+2 k+3 | ... | k k+1 k+2 k+3
    activations, broadcast   x0 x1 x2  x3  | x0 x1 x2  x3  | ... | x0 x1 x2  x3

A vector of weights thus meets the same four activations in all rows, and its dot products belong
to eight rows: no sums across lanes, and one layout for one column and for many.

Groups that share a scale form a *sub-block*. What shares bytes, such as the two nibbles of one,
is unpacked together: a *unit* is the least part of a block that is unpacked on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value

ROWS = 8  # rows of a row block
VECTOR = 32  # bytes of one group, or of one f32 or i32 for each row of a row block


class Layout(ABC):
    """A weight format's packed layout."""

    name: ClassVar[str]
    activation: ClassVar[str]  # name of the activation format that it is multiplied with
    block: ClassVar[int]  # k in a block
    block_bytes: ClassVar[int]  # of eight rows
    file_block_bytes: ClassVar[int]  # of one row

    # Helpers for kernels, on addresses:
    # pack_row(source, block, row, count) adds the first `count` k of a row's block in the file to
    # a packed block, which was zero at first.
    pack_row: ClassVar[Any]
    # dequantize_row(block, row, out, count) writes the first `count` k of a row as float32.
    dequantize_row: ClassVar[Any]


class FloatLayout(Layout):
    """Blocks of [k][row]; the last one is filled up with zeros."""

    activation = "f32"
    block = 32

    @abstractmethod
    def weights(self, e: Emitter, block: Value, k: int) -> Value:
        """Float32 weights of eight rows at k."""


class IntegerLayout(Layout):
    """Quants, unsigned when unpacked, that are multiplied with int8 activations."""

    units: ClassVar[int] = 1  # in a block
    subs: ClassVar[int] = 1  # sub-blocks in a unit
    groups: ClassVar[int]  # in a sub-block
    chain: ClassVar[int]  # groups whose products are sure to fit an int16 sum
    narrow: ClassVar[int] = 0  # groups whose sums of four fit 16 bits, if that is half a sub-block
    n_factors: ClassVar[int]
    whole_bytes: ClassVar[bool] = False  # quants reach 255, and are given as `Dots.byte_parts`
    excess_bits: ClassVar[int | None] = None  # quants are 2**bits above what they stand for

    def parts(self, dots: Dots) -> int:
        """Parts in which quants are given, each with 16 times the scale of the one before."""
        return len(dots.byte_parts(0)) if self.whole_bytes else 1

    def excess(self, dots: Dots) -> int | None:
        """`excess_bits`, also of whole bytes."""
        return dots.byte_excess_bits if self.whole_bytes else self.excess_bits

    @abstractmethod
    def unit(
        self, e: Emitter, dots: Dots, block: Value, unit: Value
    ) -> Iterator[tuple[int, int, Value]]:
        """Yields (item, group in it, quants of eight rows), as they unpack.

        An item is one part of a sub-block's quants: sub-block * parts + part.
        """

    @abstractmethod
    def factors(self, e: Emitter, block: Value) -> list[Value]:
        """Float32 for each row: the block's scale and, if there is one, its minimum."""
