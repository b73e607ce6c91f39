"""How weights lie in a GPU's memory.

A quantized matrix [rows, cols] is cut into tiles of TILE_ROWS rows, and along K into chunks of
CHUNK elements (rows and cols are padded with zeros). What a tile has in one chunk lies side by
side, row after row, so that a program that walks along K reads runs of some kilobytes in wide
loads. Each plane is [tiles, chunks, TILE_ROWS, entries]:

    plane               entries     element
    codes, low 4 bits   16 int32    16 i + w: nibble i of word w
    codes, low 2 bits   8 int32     8 i + w: bit pair i of word w
    codes, 8 bits       128 int8    in order
    high 2 bits         8 int32     as low 2 bits
    high bit            8 int16     8 i + w: bit i of word w
    scales              4, or 8 for blocks of 16
    super scales        1 or 2 float16 (d, dmin); a chunk of this plane is 256 elements

One shift of a vector of words by a vector of distances thus unpacks a chunk in the order of its
elements. Mins follow the scales of their row and chunk; where scales are float16 they are a plane
of their own in the place of the super scales, one per block of 32. 6-bit scales become bytes, which
adds 3 % to Q4_K and nothing to most. F32, F16 and BF16 keep the file's order.

Experts [experts, rows, cols] lie one after another in every plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.backends.cuda.kernels.unpack import UNPACKERS, Unpacked, unpack
from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size, type_size

TILE_ROWS = 64
CHUNK = 128

PLAIN = {
    TensorType.F32: torch.float32,
    TensorType.F16: torch.float16,
    TensorType.BF16: torch.bfloat16,
}
QUANTIZED = frozenset(UNPACKERS)

_LOW_BITS = {TensorType.Q8_0: 8, TensorType.Q2_K: 2, TensorType.Q3_K: 2}
_HIGH_BITS = {
    TensorType.Q5_0: 1,
    TensorType.Q5_1: 1,
    TensorType.Q3_K: 1,
    TensorType.Q5_K: 1,
    TensorType.Q6_K: 2,
}


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [rows, cols], or `experts` of them. Planes that a format lacks are empty."""

    type: TensorType
    rows: int
    cols: int
    experts: int
    codes: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor

    @property
    def n_bytes(self) -> int:
        planes = (self.codes, self.high, self.scales, self.supers)
        return sum(p.numel() * p.element_size() for p in planes)


def pack(
    tensor_type: TensorType, raw: Tensor, rows: int, cols: int, experts: int = 1
) -> PackedWeight:
    """Repacks `raw`, the file's bytes as uint8 [experts * rows, row bytes], on its device.

    Raises ValueError for types that are neither in QUANTIZED nor in PLAIN.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=raw.device)
    if dtype := PLAIN.get(tensor_type):
        codes = raw.contiguous().view(dtype)
        return PackedWeight(tensor_type, rows, cols, experts, codes, empty, empty, empty)
    if tensor_type not in QUANTIZED:
        raise ValueError(f"no kernel for {tensor_type.name}")
    blocks = unpack(tensor_type, raw.reshape(-1, type_size(tensor_type)))
    return _pack_blocks(tensor_type, blocks, rows, cols, experts)


def _pack_blocks(
    tensor_type: TensorType, blocks: Unpacked, rows: int, cols: int, experts: int
) -> PackedWeight:
    size = block_size(tensor_type)

    def plane(values: Tensor, per_chunk: int) -> Tensor:
        """From one run of entries per row to [experts, tiles, chunks, TILE_ROWS, per_chunk]."""
        values = values.reshape(experts, rows, -1)
        chunks = -(-values.shape[2] // per_chunk)
        tiles = -(-rows // TILE_ROWS)
        padded = values.new_zeros(experts, tiles * TILE_ROWS, chunks * per_chunk)
        padded[:, :rows, : values.shape[2]] = values
        tiled = padded.reshape(experts, tiles, TILE_ROWS, chunks, per_chunk)
        return tiled.transpose(2, 3).contiguous()

    codes = plane(blocks.codes, CHUNK)
    low_bits = _LOW_BITS.get(tensor_type, 4)
    high_bits = _HIGH_BITS.get(tensor_type, 0)
    empty = codes.new_empty(0)
    scales = plane(blocks.scales, CHUNK * blocks.scales.shape[1] // size)
    supers = empty
    if blocks.super_scales is not None:
        count = blocks.super_scales.shape[1]
        supers = plane(blocks.super_scales, count)
        if blocks.mins is not None:
            scales = torch.cat([scales, plane(blocks.mins, scales.shape[-1])], dim=-1)
    elif blocks.mins is not None:
        supers = plane(blocks.mins, scales.shape[-1])
    return PackedWeight(
        tensor_type,
        rows,
        cols,
        experts,
        codes=_words(codes, low_bits),
        high=_words(codes >> low_bits, high_bits) if high_bits else empty,
        scales=scales,
        supers=supers,
    )


def _words(codes: Tensor, bits: int) -> Tensor:
    """The low `bits` bits of each code of a chunk, gathered into words."""
    if bits == 8:
        return codes.view(torch.int8)
    word_bits = 16 if bits == 1 else 32
    fields = word_bits // bits
    runs = (codes & ((1 << bits) - 1)).reshape(*codes.shape[:-1], fields, CHUNK // fields)
    words = torch.zeros_like(runs[..., 0, :], dtype=torch.int32)
    for i in range(fields):
        words |= runs[..., i, :].to(torch.int32) << (bits * i)
    return words.to(torch.int16) if word_bits == 16 else words
