"""What formats with 256 k to a block have in common: an integer scale for each 32 or 16 of them."""

from __future__ import annotations

from abc import abstractmethod

from localllm.backends.cpu.matmul.dots import Dots
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.layout import IntegerLayout
from localllm.backends.cpu.simd import i8x16, i16x8, i32x8


class KQuant(IntegerLayout):
    """Units of two sub-blocks."""

    block = 256
    subs = 2
    activation = "q8_256"
    n_pairs: int
    sums: int  # offset of the activation sums that meet the pairs

    @abstractmethod
    def head(self, e: Emitter, block: Value, buffer: Value) -> Value:
        """Address from which scales and pairs are read; may unpack them to a buffer first."""

    @abstractmethod
    def scale(self, e: Emitter, head: Value, unit: Value, sub: int) -> Value:
        """Integer scale of a sub-block, one i32 for each row."""

    @abstractmethod
    def pair(self, e: Emitter, head: Value, index: int) -> Value:
        """i16[row][2], multiplied with a pair of activation sums."""

    @abstractmethod
    def combine(
        self, e: Emitter, dots: Dots, total: Value, pairs: Value, factors: list[Value]
    ) -> Value:
        """Float32 for each row: the block's product, but for the activations' scale.

        `total` is the sum over scale * quants * activations, `pairs` that over pairs * sums.
        """


class WithMinima(KQuant):
    """x = d * scale * quant - dmin * minimum; the pairs are minima. Blocks begin with d, dmin."""

    n_factors = 2

    def factors(self, e: Emitter, block: Value) -> list[Value]:
        return [e.to_f32(e.load(i16x8, block, 0)), e.to_f32(e.load(i16x8, block, 16))]

    def combine(
        self, e: Emitter, dots: Dots, total: Value, pairs: Value, factors: list[Value]
    ) -> Value:
        scale, minimum = factors
        return scale * e.to_f32(total) - minimum * e.to_f32(pairs)


class WithSignedScales(KQuant):
    """x = d * scale * number; the head is signed bytes [j][row][2], scales of sub-blocks 2j, 2j+1.

    The pairs are these scales too: quants are larger than the numbers by a constant, which
    scale * sum of activations takes back. Blocks begin with d.
    """

    n_factors = 1

    def scale(self, e: Emitter, head: Value, unit: Value, sub: int) -> Value:
        both = e.cast(e.sign_extend(e.load(i8x16, head + unit * 16), "i16"), i32x8)
        return (both if sub else both << 16).shift_right_signed(16)

    def pair(self, e: Emitter, head: Value, index: int) -> Value:
        return e.sign_extend(e.load(i8x16, head, 16 * index), "i16")

    def factors(self, e: Emitter, block: Value) -> list[Value]:
        return [e.to_f32(e.load(i16x8, block, 0))]

    def combine(
        self, e: Emitter, dots: Dots, total: Value, pairs: Value, factors: list[Value]
    ) -> Value:
        if (bits := self.excess(dots)) is not None:
            total = total - (pairs << bits)
        return factors[0] * e.to_f32(total)
