"""The paged key and value cache: its layout, and the kernel that stores a step's keys and values.

A group's cache is one array [block][layer][kv head][keys | values] of float16. Within a head's
part of a block the keys are [key_dim][16 positions], so that scores of 16 positions come from
lane-wise sums, and the values [16 positions][value columns], where value columns are value_dim
rounded up to 16; the columns added are zeros. Memory of a block is one piece: touching a block
touches nothing of its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import (
    H_SLOTS,
    H_TOKENS,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.simd import (
    as_i16x8,
    extract,
    f32_to_f16,
    i16_to_i32,
    lanes_below,
    load_masked_f32x8,
    maximum,
    minimum,
    scalar_load_i32,
    scalar_store_i16,
    splat_f32x8,
    store_f16x8,
)
from localllm.backends.program import KVGroup, KVLayer

F16_BYTES = 2
VALUE_COLUMNS = 16  # values are padded to a multiple of this
_F16_MAX = 65504.0
_CACHE_LINE = 64
_CLAIM_ROWS_ABOVE = 64  # with more tokens than this, a claim takes a block's worth of them


def value_columns(value_dim: int) -> int:
    return -(-value_dim // VALUE_COLUMNS) * VALUE_COLUMNS


def key_bytes(layer: KVLayer) -> int:
    """Bytes of the keys of one block of one head; its values follow them."""
    return BLOCK_TOKENS * F16_BYTES * layer.key_dim


def head_bytes(layer: KVLayer) -> int:
    """Bytes of keys and values of one block of one head."""
    values = BLOCK_TOKENS * F16_BYTES * value_columns(layer.value_dim)
    return -(-(key_bytes(layer) + values) // _CACHE_LINE) * _CACHE_LINE


def kv_block_bytes(layer: KVLayer) -> int:
    """Bytes of one block of one layer."""
    return layer.kv_heads * head_bytes(layer)


def group_block_bytes(group: KVGroup) -> int:
    """Bytes of one block over all layers of the group: the distance from block to block."""
    return sum(map(kv_block_bytes, group.layers))


def layer_offset(group: KVGroup, index: int) -> int:
    """Where layer `index` of the group starts within a block."""
    return sum(map(kv_block_bytes, group.layers[:index]))


@dataclass(frozen=True)
class StoreArgs(Arguments):
    """Words of `kv_store`. k [T, kv_heads * key_dim] and v [T, kv_heads * value_dim] are float32.

    `cache` is the group's array plus `layer_offset`, aligned to 64 bytes.
    """

    k: int
    k_stride: int
    v: int
    v_stride: int
    cache: int
    block_bytes: int  # group_block_bytes
    head_bytes: int
    group: int
    kv_heads: int
    key_dim: int
    value_dim: int


(
    K,
    K_STRIDE,
    V,
    V_STRIDE,
    CACHE,
    BLOCK_BYTES,
    HEAD_BYTES,
    GROUP,
    KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
) = range(FIRST_WORD, FIRST_WORD + 11)
AFTER_STORE_ARGS = FIRST_WORD + 11  # the first word of arguments that extend these


@kernel
def kv_store(args: int, tid: int, nthreads: int) -> None:
    """Rounds the step's keys and values to float16 and stores them in their slots.

    Values beyond float16's range become its largest: an infinite value would make every later
    output of its sequence NaN.
    """
    head = header(args)
    tokens = arg_i64(head, H_TOKENS)
    slots = arg_i64(head, H_SLOTS) + arg_i64(args, GROUP) * tokens * 4
    chunk = store_claim(tokens)
    first = claim(args, chunk)
    while first < tokens:
        for token in range(first, min(first + chunk, tokens)):
            k = arg_i64(args, K) + token * arg_i64(args, K_STRIDE) * 4
            v = arg_i64(args, V) + token * arg_i64(args, V_STRIDE) * 4
            slot = scalar_load_i32(slots, token * 4)
            to = arg_i64(args, CACHE) + slot // BLOCK_TOKENS * arg_i64(args, BLOCK_BYTES)
            store_heads(
                k,
                v,
                to,
                slot % BLOCK_TOKENS,
                arg_i64(args, HEAD_BYTES),
                arg_i64(args, KV_HEADS),
                arg_i64(args, KEY_DIM),
                arg_i64(args, VALUE_DIM),
            )
        first = claim(args, chunk)


@helper
def store_claim(tokens: int) -> int:
    """Tokens to store at a time."""
    return BLOCK_TOKENS if tokens > _CLAIM_ROWS_ABOVE else 1


@helper
def store_heads(
    k: int,
    v: int,
    to: int,
    position: int,
    head_bytes: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """Stores one token's keys and values at a position of the block at `to`."""
    columns = (value_dim + VALUE_COLUMNS - 1) // VALUE_COLUMNS * VALUE_COLUMNS
    for _ in range(kv_heads):
        for d in range(0, key_dim, 8):
            keys = i16_to_i32(as_i16x8(f32_to_f16(_load_clamped(k, d, key_dim))))
            for lane in range(min(8, key_dim - d)):
                at = ((d + lane) * BLOCK_TOKENS + position) * F16_BYTES
                scalar_store_i16(to, at, extract(keys, lane))
        values = to + (key_dim * BLOCK_TOKENS + position * columns) * F16_BYTES
        for d in range(0, columns, 8):
            store_f16x8(values, d * F16_BYTES, f32_to_f16(_load_clamped(v, d, value_dim)))
        k += key_dim * 4
        v += value_dim * 4
        to += head_bytes


@helper
def _load_clamped(x: int, index: int, count: int) -> Any:
    """x[index..index+8], zeros from `count` on, within float16's range; NaN stays NaN."""
    values = load_masked_f32x8(x, index * 4, lanes_below(count - index))
    return maximum(splat_f32x8(-_F16_MAX), minimum(splat_f32x8(_F16_MAX), values))
