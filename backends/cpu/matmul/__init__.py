"""Products of weight matrices with activations: packing, quantization, tiles.

`layout` explains how weights lie in memory, `tiles` how they are multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localllm.backends.cpu.kernel import Kernel
from localllm.backends.cpu.matmul.activations import ActivationFormat
from localllm.backends.cpu.matmul.convert import convert, storage_type
from localllm.backends.cpu.matmul.formats import LAYOUTS
from localllm.backends.cpu.matmul.multiply import multiplier, scratch_bytes
from localllm.backends.cpu.matmul.pack import embedder, packer
from localllm.gguf import TensorType

__all__ = ["FORMATS", "ActivationFormat", "WeightFormat", "convert", "storage_type"]

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True)
class WeightFormat:
    """A format whose matrices are multiplied as they are stored, without conversion."""

    name: str
    activation: ActivationFormat

    def packed_bytes(self, rows: int, cols: int) -> int:
        """Size of a packed matrix; rows are filled up to a multiple of 8."""
        layout = LAYOUTS[self.name]
        return -(-rows // 8) * -(-cols // layout.block) * layout.block_bytes

    def pack(
        self,
        raw: npt.NDArray[np.uint8],
        rows: int,
        cols: int,
        out: npt.NDArray[np.uint8],
        first: int,
        last: int,
    ) -> None:
        """Packs row blocks first..last, of eight rows, of a matrix in the file's format.

        `raw` is [rows, bytes of a row], `out` holds the whole matrix, `packed_bytes` long.
        Releases the GIL; threads may pack different row blocks of one matrix.
        """
        args = np.array(
            [raw.ctypes.data, raw.shape[1], rows, cols, out.ctypes.data, first, last], np.int64
        )
        _KERNEL(self.pack_kernel.address)(args.ctypes.data, 0, 1)

    @property
    def pack_kernel(self) -> Kernel:
        return packer(self.name)

    @property
    def matmul(self) -> Kernel:
        return multiplier(self.name)

    @property
    def embed(self) -> Kernel:
        return embedder(self.name)

    def matmul_scratch_bytes(self, cols: int) -> int:
        """What a thread needs while it runs `matmul`."""
        return scratch_bytes(LAYOUTS[self.name])


FORMATS: Mapping[TensorType, WeightFormat] = {
    TensorType[name]: WeightFormat(name, ActivationFormat(layout.activation))
    for name, layout in LAYOUTS.items()
}
