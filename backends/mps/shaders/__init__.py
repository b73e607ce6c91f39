"""Metal kernels; importing this needs no torch, and the source can be read anywhere."""

from __future__ import annotations

from pathlib import Path

from localllm.gguf import TensorType

# As in the source.
ROWS_PER_GROUP = 4  # SIMD groups of a thread group, a row each
LANES = 32
COLUMNS = 8  # vectors that a SIMD group takes

FORMATS = frozenset({TensorType.Q4_0, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K})


def source() -> str:
    """Metal source of all kernels."""
    return Path(__file__).with_name("matvec.metal").read_text(encoding="utf-8")


def kernel_name(tensor_type: TensorType) -> str:
    return f"matvec_{tensor_type.name.lower()}"
