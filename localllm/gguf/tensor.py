"""One tensor of a GGUF file: its description, and its bytes in the mapped file."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localllm.errors import GGUFError
from localllm.gguf.blocks import TensorType, row_bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` is in numpy's order: rows first, the K of a matrix product last.

    Arrays from `raw` keep the file mapped for as long as they live.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    n_bytes: int
    _data: mmap.mmap = field(repr=False, compare=False)
    _offset: int = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as one matrix [rows, K]."""
        return math.prod(self.shape[:-1])

    def raw(self) -> npt.NDArray[np.uint8]:
        """The file's bytes [rows, row_bytes], mapped and read-only."""
        flat = np.frombuffer(self._data, np.uint8, self.n_bytes, self._offset)
        return flat.reshape(self.rows, row_bytes(self.type, self.shape[-1]))

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values as float32, of `shape`; a copy unless the file has float32."""
        if self.type == TensorType.F32:
            return self.raw().view(np.float32).reshape(self.shape)
        from gguf import GGMLQuantizationType, quants  # slow to import, and seldom needed

        try:
            with np.errstate(all="ignore"):  # damaged weights may hold infinities and NaN
                values = quants.dequantize(self.raw(), GGMLQuantizationType(self.type))
        except (NotImplementedError, ValueError) as error:
            raise GGUFError(f"tensor {self.name!r}: cannot convert {self.type.name}") from error
        return np.asarray(values, np.float32).reshape(self.shape)

    def drop_pages(self) -> None:
        """Takes the tensor's pages out of resident memory; reading them again is only slower."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = self._offset - self._offset % mmap.PAGESIZE
        self._data.madvise(mmap.MADV_DONTNEED, start, self._offset + self.n_bytes - start)
