"""Arithmetic of which a row's bits do not depend on the other rows.

Sums, differences, products, quotients and roots are rounded correctly by every device, so they
need nothing. The rest does: sums, products of matrices, and functions such as exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm.backends.torch_common.target import Target
from localllm.backends.torch_common.weights import Matrix

# torch computes the last elements of a thread's share one by one, in other code than whole vectors.
# Pieces that one thread does, of whole pairs of the longest vectors, leave no such rest.
_PIECE = 16384
_VECTORS = 64


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function of single elements that is not correctly rounded."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.flatten()
    size = flat.numel()
    padded = torch.zeros(-(-size // _VECTORS) * _VECTORS, dtype=x.dtype)
    padded[:size] = flat
    for piece in torch.split(padded, _PIECE):
        piece.copy_(function(piece))
    return padded[:size].view(x.shape)


def ordered_sum(x: Tensor) -> Tensor:
    """Along the last dimension, which goes: halves are added to each other until one is left."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        sums = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([sums, x[..., -1:]], -1) if size % 2 else sums
    return x[..., 0]


def added(parts: Sequence[Tensor]) -> Tensor:
    """In the given order: how a library's sum over ranks rounds depends on its size."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def softmax(x: Tensor) -> Tensor:
    """Along the last dimension."""
    weights = elementwise(torch.exp, x - x.amax(-1, keepdim=True))
    return weights / ordered_sum(weights)[..., None]


def linear(target: Target, x: Tensor, weight: Matrix) -> Tensor:
    """x @ weight.T in float32; the weight's rows are brought to its dtype by and by."""
    rows, tile = len(x), target.tile_rows
    tiles = torch.zeros(-(-rows // tile), tile, weight.cols, dtype=weight.dtype, device=x.device)
    tiles.view(-1, weight.cols)[:rows] = x
    out = torch.empty(*tiles.shape[:2], weight.rows, device=x.device)
    for first, values in weight.slabs():
        transposed = values.T
        for number in range(len(tiles)):
            out[number, :, first : first + len(values)] = tiles[number] @ transposed
    return out.view(-1, weight.rows)[:rows]
