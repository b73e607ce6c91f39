"""Quantized matrix-vector products on an Apple GPU: the launch. Not yet run on Apple hardware."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from localllm.backends.mps.shaders import COLUMNS, FORMATS, LANES, ROWS_PER_GROUP, kernel_name
from localllm.backends.torch_common.weights import Matrix
from localllm.gguf.blocks import row_bytes

_GROUP = (LANES * ROWS_PER_GROUP, 1, 1)


class ShaderLibrary(Protocol):
    """What `torch.mps.compile_shader` returns: kernels by name.

    A kernel is called with its buffers in order, tensors (at their storage offset) and numbers
    (int becomes `long`), and the numbers of `threads` and of those in a group, `group_size`.
    """

    def __getattr__(self, name: str) -> Any: ...


def has_kernel(matrix: Matrix) -> bool:
    return matrix.kind in FORMATS


def matvec(shaders: ShaderLibrary, x: Tensor, weight: Matrix, out: Tensor) -> None:
    """out [vectors, rows] = x [vectors, cols] @ weight.T, all float32.

    Rows of x and out may lie apart. A vector's bits do not depend on how many there are. Raises
    ValueError for a format without a kernel.
    """
    if weight.kind is None or not has_kernel(weight):
        raise ValueError(f"no Metal kernel for {weight.kind.name if weight.kind else 'floats'}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
    vectors = len(x)
    if vectors == 0:
        return
    groups = -(-weight.rows // ROWS_PER_GROUP), -(-vectors // COLUMNS)
    kernel = getattr(shaders, kernel_name(weight.kind))
    kernel(
        weight.data, x, out,
        vectors, weight.rows, weight.cols, row_bytes(weight.kind, weight.cols),
        x.stride(0), out.stride(0),
        threads=(groups[0] * _GROUP[0], groups[1], 1), group_size=_GROUP,
    )  # fmt: skip
