"""Random blocks of every format, and what gguf-py makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size, type_size

# Where the float16 scales of a block lie; all other bytes may hold anything.
_HALVES: dict[TensorType, tuple[int, ...]] = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}


def random_blocks(
    tensor_type: TensorType, rows: int, cols: int, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """[rows, row bytes] of random bytes with finite scales; MXFP4's exponents cover their range."""
    n = rows * cols // block_size(tensor_type)
    blocks = rng.integers(0, 256, (n, type_size(tensor_type)), dtype=np.uint8)
    for at in _HALVES.get(tensor_type, ()):
        scales = rng.uniform(-0.01, 0.01, n).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(n, 2)
    if tensor_type == TensorType.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, n)
    return blocks.reshape(rows, -1)


def dequantized(tensor_type: TensorType, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The reference: gguf-py's own arithmetic."""
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(
        raw, gguf.GGMLQuantizationType(int(tensor_type))
    )
    return values
