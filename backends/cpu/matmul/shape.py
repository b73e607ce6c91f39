"""How large the tiles are that read unpacked weights, for each instruction set.

A tile needs as many sums as hide the latency of its multiply-adds, and no more registers than
there are: sums, one vector of weights for each vector of rows, one of activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu import target
from localllm.backends.cpu.matmul.layout import FloatLayout, Layout


@dataclass(frozen=True)
class TileShape:
    few: int  # columns up to which unpacking for each tile is faster
    lanes: int  # rows in a vector
    row_blocks: int
    columns: tuple[int, int, int]  # of the main tile, and of two for what is left; the last is 1


# With a total beside each sum, or with registers of half a vector.
_NARROW = TileShape(few=8, lanes=8, row_blocks=2, columns=(3, 2, 1))
_WIDE = TileShape(few=4, lanes=8, row_blocks=2, columns=(6, 3, 1))
_AVX512 = TileShape(few=4, lanes=16, row_blocks=4, columns=(6, 3, 1))


def tile_shape(layout: Layout) -> TileShape:
    if target.current() == "avx512":
        return _AVX512
    if target.current() == "vnni" or (isinstance(layout, FloatLayout) and not target.is_neon()):
        return _WIDE
    return _NARROW
