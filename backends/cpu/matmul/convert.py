"""Formats without kernels are converted, when a model is loaded, to one that has them.

Q8_0 keeps all of them but for 1e-6 to 3e-5 of the weights' energy, a hundredth of what 4 bits
lose; five bits would lose 1e-3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localllm.backends.cpu.matmul.formats import LAYOUTS
from localllm.gguf import TensorType

_WIDE = frozenset({"F64", "I8", "I16", "I32", "I64"})


def storage_type(kind: TensorType) -> TensorType:
    """The format that a tensor is kept in."""
    if kind.name in LAYOUTS:
        return kind
    return TensorType.F32 if kind.name in _WIDE else TensorType.Q8_0


def convert(rows: npt.NDArray[np.float32], to: TensorType) -> npt.NDArray[np.uint8]:
    """Float32 rows [n, k] as the file would hold them in another format: [n, bytes of a row]."""
    from gguf import GGMLQuantizationType  # slow to import, and seldom needed
    from gguf.quants import quantize

    raw = quantize(np.ascontiguousarray(rows, np.float32), GGMLQuantizationType(to))
    return raw.view(np.uint8).reshape(len(rows), -1)
