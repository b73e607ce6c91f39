"""Weight blocks of GGUF files to float32, in torch operations that every device has.

A dequantizer takes blocks as they lie in the file, uint8 [n, bytes of a block], and returns
float32 [n, elements of a block], bit for bit what gguf-py's gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from localllm.gguf import TensorType

Dequantizer: TypeAlias = Callable[[Tensor], Tensor]

# What the sixteen codes of the formats with a table stand for.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


def q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return (values.float() - 16) * _half(blocks, 0)


def q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return values.float() * _half(blocks, 0) + _half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    return _signed(blocks[:, 2:]).float() * _half(blocks, 0)


def q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16, None]
    values = _crumbs(blocks[:, 16:80]).view(-1, 16, 16)
    d, dmin = _half(blocks, 80)[..., None], _half(blocks, 82)[..., None]
    return (d * (scales & 15).float() * values.float() - dmin * (scales >> 4).float()).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    high = _planes(blocks[:, :32], 8)
    values = _crumbs(blocks[:, 32:96]).float() - (1 - high.float()) * 4
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | _spread(packed[:, 8:], (0, 2, 4, 6), 3) << 4
    d = _half(blocks, 108) * (scales.float() - 32)
    return (d[..., None] * values.view(-1, 16, 16)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    return _with_minimum(blocks, _split_nibbles(blocks[:, 16:], 32))


def q5_k(blocks: Tensor) -> Tensor:
    return _with_minimum(
        blocks, _split_nibbles(blocks[:, 48:], 32) | _planes(blocks[:, 16:48], 8) << 4
    )


def q6_k(blocks: Tensor) -> Tensor:
    low = _split_nibbles(blocks[:, :128], 64)
    values = low | _crumbs(blocks[:, 128:192]) << 4
    scales = _half(blocks, 208) * _signed(blocks[:, 192:208]).float()
    return (scales[..., None] * (values.float() - 32).view(-1, 16, 16)).flatten(1)


def iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(_nibbles(blocks[:, 2:]), _IQ4_VALUES)


def iq4_xs(blocks: Tensor) -> Tensor:
    low = _interleaved_nibbles(blocks[:, 4:8])
    high = _interleaved_crumbs(blocks[:, 2:4])
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    values = _looked_up(_split_nibbles(blocks[:, 8:], 16), _IQ4_VALUES)
    return (scales[..., None] * values.view(-1, 8, 32)).flatten(1)


def mxfp4(blocks: Tensor) -> Tensor:
    scales = _looked_up(blocks[:, :1], tuple(2.0 ** (e - 128) for e in range(256)))
    return scales * _looked_up(_nibbles(blocks[:, 1:]), _FP4_VALUES)


DEQUANTIZERS: Mapping[TensorType, Dequantizer] = {
    TensorType.Q4_0: q4_0,
    TensorType.Q4_1: q4_1,
    TensorType.Q5_0: q5_0,
    TensorType.Q5_1: q5_1,
    TensorType.Q8_0: q8_0,
    TensorType.Q2_K: q2_k,
    TensorType.Q3_K: q3_k,
    TensorType.Q4_K: q4_k,
    TensorType.Q5_K: q5_k,
    TensorType.Q6_K: q6_k,
    TensorType.IQ4_NL: iq4_nl,
    TensorType.IQ4_XS: iq4_xs,
    TensorType.MXFP4: mxfp4,
}


def _with_minimum(blocks: Tensor, values: Tensor) -> Tensor:
    """Q4_K and Q5_K: eight parts of 32, each with a scale and a minimum of six bits."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 1)
    d = (_half(blocks, 0) * scales.float())[..., None]
    m = (_half(blocks, 2) * minima.float())[..., None]
    return (d * values.float().view(-1, 8, 32) - m).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.int8)


def _spread(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """All bytes shifted right by the first of the shifts, then all by the second, ..."""
    return torch.cat([packed >> shift & mask for shift in shifts], -1)


def _nibbles(packed: Tensor) -> Tensor:
    """[n, k] bytes: the k low halves, then the k high halves."""
    return _spread(packed, (0, 4), 15)


def _split_nibbles(packed: Tensor, size: int) -> Tensor:
    """As `_nibbles`, for each run of `size` bytes."""
    return _nibbles(packed.reshape(len(packed), -1, size)).flatten(1)


def _crumbs(packed: Tensor) -> Tensor:
    """Pairs of bits of each run of 32 bytes: first the lowest of all 32, then the next."""
    return _spread(packed.reshape(len(packed), -1, 32), (0, 2, 4, 6), 3).flatten(1)


def _planes(packed: Tensor, count: int) -> Tensor:
    """Single bits of all bytes: first bit 0 of each byte, then bit 1."""
    return _spread(packed, tuple(range(count)), 1)


def _bits(packed: Tensor) -> Tensor:
    """Single bits, byte by byte."""
    return torch.stack([packed >> bit & 1 for bit in range(8)], -1).flatten(1)


def _interleaved_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _interleaved_crumbs(packed: Tensor) -> Tensor:
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)


def _looked_up(codes: Tensor, values: tuple[float, ...]) -> Tensor:
    found = _table(values, codes.device).index_select(0, codes.flatten().int())
    return found.view(codes.shape)


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
