"""From the blocks of a GGUF file to plain arrays, in torch so that a GPU can do it.

All functions take blocks [n, block bytes] as uint8. Codes are the unsigned integers as stored,
[n, block size] uint8 in the order of the elements; what they mean is the business of `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.gguf import TensorType


@dataclass(frozen=True)
class Unpacked:
    """One entry of each array per block."""

    codes: Tensor  # [n, block size] uint8
    scales: Tensor  # [n, scales per block]: float16, uint8 or int8
    mins: Tensor | None = None  # like scales
    super_scales: Tensor | None = None  # [n, 1 or 2] float16: d, or d and dmin


def unpack(tensor_type: TensorType, blocks: Tensor) -> Unpacked:
    return UNPACKERS[tensor_type](blocks)


def _half(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    return blocks[:, at : at + 2 * count].contiguous().view(torch.float16)


def _fields(data: Tensor, bits: int, run: int) -> Tensor:
    """Fields of `bits` bits: the lowest of each `run` bytes, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    runs = data.reshape(len(data), -1, 1, run)
    return ((runs >> shifts[:, None]) & ((1 << bits) - 1)).reshape(len(data), -1)


def _high_bits_32(data: Tensor) -> Tensor:
    """Bit i of 4 bytes as a little-endian word, [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, :, None] >> shifts) & 1).reshape(len(data), 32)


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_fields(b[:, 2:18], 4, 16), _half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_fields(b[:, 4:20], 4, 16), _half(b, 0), _half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    codes = _fields(b[:, 6:22], 4, 16) | (_high_bits_32(b[:, 2:6]) << 4)
    return Unpacked(codes, _half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    codes = _fields(b[:, 8:24], 4, 16) | (_high_bits_32(b[:, 4:8]) << 4)
    return Unpacked(codes, _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[:, 2:34], _half(b, 0))


def _q2_k(b: Tensor) -> Unpacked:
    """Scale and min of a run of 16 stay in one byte, low and high nibble."""
    return Unpacked(_fields(b[:, 16:80], 2, 32), b[:, :16], super_scales=_half(b, 80, 2))


def _q3_k(b: Tensor) -> Unpacked:
    codes = _fields(b[:, 32:96], 2, 32) | (_fields(b[:, :32], 1, 32) << 2)
    low = _fields(b[:, 96:104], 4, 8)
    high = _fields(b[:, 104:108], 2, 4)
    scales = (low | (high << 4)).to(torch.int8) - 32
    return Unpacked(codes, scales, super_scales=_half(b, 108))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 mins that K-quants keep in 12 bytes."""
    scales, mins, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        torch.cat([scales & 63, (rest & 15) | ((scales >> 2) & 48)], 1),
        torch.cat([mins & 63, (rest >> 4) | ((mins >> 2) & 48)], 1),
    )


def _q4_k(b: Tensor) -> Unpacked:
    scales, mins = _six_bit_scales(b[:, 4:16])
    return Unpacked(_fields(b[:, 16:144], 4, 32), scales, mins, _half(b, 0, 2))


def _q5_k(b: Tensor) -> Unpacked:
    scales, mins = _six_bit_scales(b[:, 4:16])
    codes = _fields(b[:, 48:176], 4, 32) | (_fields(b[:, 16:48], 1, 32) << 4)
    return Unpacked(codes, scales, mins, _half(b, 0, 2))


def _q6_k(b: Tensor) -> Unpacked:
    codes = _fields(b[:, :128], 4, 64) | (_fields(b[:, 128:192], 2, 32) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8)
    return Unpacked(codes, scales, super_scales=_half(b, 208))


def _iq4_xs(b: Tensor) -> Unpacked:
    low = ((b[:, 4:8, None] >> _shifts(b, 0, 4)) & 15).reshape(-1, 8)
    high = ((b[:, 2:4, None] >> _shifts(b, 0, 2, 4, 6)) & 3).reshape(-1, 8)
    scales = (low | (high << 4)).to(torch.int8) - 32
    return Unpacked(_fields(b[:, 8:136], 4, 16), scales, super_scales=_half(b, 0))


def _shifts(like: Tensor, *shifts: int) -> Tensor:
    return torch.tensor(shifts, dtype=torch.uint8, device=like.device)


def _mxfp4(b: Tensor) -> Unpacked:
    return Unpacked(_fields(b[:, 1:17], 4, 16), b[:, :1])


UNPACKERS: dict[TensorType, Callable[[Tensor], Unpacked]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_NL: _q4_0,  # the same blocks; the codes stand for other values
    TensorType.IQ4_XS: _iq4_xs,
    TensorType.MXFP4: _mxfp4,
}
