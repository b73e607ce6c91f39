"""Rotary embedding, alone or together with the store of keys and values in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.cuda.kernels.paged import PagedCache, page_strides
from localllm.backends.program import RopeTable


@dataclass(frozen=True)
class Angles:
    """cos and sin [positions, pairs] float32 of a table; products in float64, as it wants."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @property
    def pairs(self) -> int:
        return self.cos.shape[1]


def angles(table: RopeTable, positions: int, device: torch.device | str = "cpu") -> Angles:
    """Of positions 0..positions."""
    at = torch.arange(positions, dtype=torch.float64)[:, None]
    products = at * torch.from_numpy(table.inv_freq)[None]
    cos, sin = (torch.cos(products) * table.scale, torch.sin(products) * table.scale)
    return Angles(cos.float().to(device), sin.float().to(device), table.interleaved)


@triton.jit
def _rotated_head(
    x, cos, sin, position, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The head at x, [BLOCK_D] float32; PAIRS 0: as it is."""
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    own = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if PAIRS == 0:
        return own
    else:
        rotates = d < 2 * PAIRS
        if INTERLEAVED:
            pair, second = d // 2, d % 2 == 1
            partner = tl.where(second, d - 1, d + 1)
        else:
            pair, second = d % PAIRS, d >= PAIRS
            partner = tl.where(second, d - PAIRS, d + PAIRS)
        other = tl.load(x + partner, mask=rotates, other=0.0).to(tl.float32)
        at = position * PAIRS + pair
        c = tl.load(cos + at, mask=rotates, other=1.0)
        s = tl.load(sin + at, mask=rotates, other=0.0)
        return tl.where(rotates, own * c + tl.where(second, other * s, -other * s), own)


@triton.jit
def _store_head(
    values, pages, scales, slot, head, block_stride, token_stride, head_stride,
    scale_block, scale_token, scale_head, BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, token = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    d = tl.arange(0, BLOCK_D)
    at = block * block_stride + token * token_stride + head * head_stride
    if QUANTIZED:
        groups = tl.reshape(values, (BLOCK_D // 32, 32))
        scale = (tl.max(tl.abs(groups), axis=1) / 127.0).to(tl.float16)
        divisor = tl.where(scale == 0, 1.0, scale.to(tl.float32))
        scaled = groups / divisor[:, None]
        nearest = tl.where(scaled < 0, tl.ceil(scaled - 0.5), tl.floor(scaled + 0.5))
        codes = tl.clamp(nearest, -127.0, 127.0).to(tl.int8)
        tl.store(pages + at + d, tl.reshape(codes, (BLOCK_D,)), mask=d < DIM)
        g = tl.arange(0, BLOCK_D // 32)
        scale_at = block * scale_block + token * scale_token + head * scale_head
        tl.store(scales + scale_at + g, scale, mask=g * 32 < DIM)
    else:
        tl.store(pages + at + d, values.to(pages.dtype.element_ty), mask=d < DIM)


@triton.jit
def _rope_kernel(
    x, out, cos, sin, positions, x_stride, out_stride,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    source = x + token * x_stride + head * DIM
    rotated = _rotated_head(source, cos, sin, position, PAIRS, INTERLEAVED, DIM, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    target = out + token * out_stride + head * DIM + d
    tl.store(target, rotated.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _rope_store_kernel(
    q, k, v, q_out, keys, values, key_scales, value_scales, cos, sin, positions, slots,
    q_stride, k_stride, v_stride, q_out_stride,
    key_block, key_token, key_head, value_block, value_token, value_head,
    key_scale_block, key_scale_token, key_scale_head,
    value_scale_block, value_scale_token, value_scale_head,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the first HEADS rotate a query head, the others store a KV head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    if head < HEADS:
        source = q + token * q_stride + head * DIM
        rotated = _rotated_head(source, cos, sin, position, PAIRS, INTERLEAVED, DIM, BLOCK_D)
        d = tl.arange(0, BLOCK_D)
        target = q_out + token * q_out_stride + head * DIM + d
        tl.store(target, rotated.to(q_out.dtype.element_ty), mask=d < DIM)
    else:
        head -= HEADS
        slot = tl.load(slots + token).to(tl.int64)
        source = k + token * k_stride + head * DIM
        rotated = _rotated_head(source, cos, sin, position, PAIRS, INTERLEAVED, DIM, BLOCK_D)
        _store_head(
            rotated, keys, key_scales, slot, head, key_block, key_token, key_head,
            key_scale_block, key_scale_token, key_scale_head,
            BLOCK_TOKENS, QUANTIZED, DIM, BLOCK_D,
        )  # fmt: skip
        source = v + token * v_stride + head * VALUE_DIM
        value = _rotated_head(source, cos, sin, position, 0, INTERLEAVED, VALUE_DIM, BLOCK_V)
        _store_head(
            value, values, value_scales, slot, head, value_block, value_token, value_head,
            value_scale_block, value_scale_token, value_scale_head,
            BLOCK_TOKENS, QUANTIZED, VALUE_DIM, BLOCK_V,
        )  # fmt: skip


def rope(x: Tensor, out: Tensor, positions: Tensor, angles: Angles, head_dim: int) -> None:
    """out = x with every head rotated by its row's position (int32 [rows])."""
    if len(x) == 0:
        return
    _rope_kernel[(len(x), x.shape[1] // head_dim)](
        x, out, angles.cos, angles.sin, positions, x.stride(0), out.stride(0),
        PAIRS=angles.pairs, INTERLEAVED=angles.interleaved, DIM=head_dim,
        BLOCK_D=_block(head_dim), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_out: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slots: Tensor,
    angles: Angles,
) -> None:
    """Rotates q into q_out, and k into the cache beside v, in one launch."""
    head_dim = cache.keys.shape[3]
    _launch(q, k, v, q_out, cache, positions, slots, angles, q.shape[1] // head_dim)


def store(k: Tensor, v: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """Writes keys and values [rows, KV heads * dimension] to the slots (int32 [rows])."""
    _launch(k, k, v, k, cache, slots, slots, None, 0)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_out: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slots: Tensor,
    angles: Angles | None,
    heads: int,
) -> None:
    if len(k) == 0:
        return
    key_dim, value_dim = cache.keys.shape[3], cache.values.shape[3]
    _rope_store_kernel[(len(k), heads + cache.kv_heads)](
        q, k, v, q_out, cache.keys, cache.values, cache.key_scales, cache.value_scales,
        angles.cos if angles else None, angles.sin if angles else None, positions, slots,
        q.stride(0), k.stride(0), v.stride(0), q_out.stride(0),
        *page_strides(cache.keys), *page_strides(cache.values),
        *page_strides(cache.key_scales), *page_strides(cache.value_scales),
        HEADS=heads, PAIRS=angles.pairs if angles else 0,
        INTERLEAVED=angles.interleaved if angles else False,
        BLOCK_TOKENS=cache.keys.shape[1], QUANTIZED=cache.quantized,
        DIM=key_dim, BLOCK_D=_block(key_dim), VALUE_DIM=value_dim, BLOCK_V=_block(value_dim),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _block(dim: int) -> int:
    return max(32, int(triton.next_power_of_2(dim)))
