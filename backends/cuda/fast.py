"""What `--fast` computes in another way: the bits of an answer then depend on the batch.

Products of many rows go to cuBLAS, with the weights dequantized slab by slab. This file is the one
place that says when.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.backends.cuda.kernels import matmul as exact
from localllm.backends.cuda.kernels.elementwise import act_mul
from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import PLAIN, PackedWeight
from localllm.backends.program import ActivationName

# Rows from which a product is bound by arithmetic, not by reading the weights, by their format.
_PLAIN_ROWS = 64
_QUANTIZED_ROWS = 192
_SLAB_ELEMENTS = 1 << 26  # of the weights that are dequantized at once


def matmul(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: ActivationName | None = None,
) -> None:
    """Like the exact one, without experts."""
    if len(x) < (_PLAIN_ROWS if weight.type in PLAIN else _QUANTIZED_ROWS):
        exact.matmul(x, weight, out, bias=bias, residual=residual, act=act)
        return
    if act is not None:
        both = torch.empty((len(x), weight.rows), dtype=out.dtype, device=x.device)
        matmul(x, weight, both, bias=bias)
        gate, up = both.chunk(2, 1)
        act_mul(gate, up, out, act)
        return
    step = max(1, _SLAB_ELEMENTS // weight.cols)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        product = torch.mm(x, _rows(weight, first, last, x.dtype).T)
        total = product.float() if bias is not None or residual is not None else product
        if bias is not None:
            total += bias[first:last]
        if residual is not None:
            total += residual[:, first:last]
        out[:, first:last].copy_(total)


def _rows(weight: PackedWeight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Dequantized, [last - first, cols]."""
    if weight.type in PLAIN:
        return weight.codes.view(-1, weight.cols)[first:last].to(dtype)
    ids = torch.arange(first, last, dtype=torch.int32, device=weight.codes.device)
    values = torch.empty((last - first, weight.cols), dtype=dtype, device=ids.device)
    embed(ids, weight, values)
    return values
