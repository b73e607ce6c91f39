"""Attention over the paged cache, for prefill and decode alike.

Positions are divided into fixed splits of SPLIT. A row's softmax runs over a split in blocks, and
the splits' (largest score, sum, values) are folded in order. Prefill folds as it goes; decode
computes splits side by side and folds in a second kernel, with the same statements. A position
that a row does not see adds exactly nothing, so a row's bits depend neither on the rows of its tile
nor on how its prompt was cut.

A tile of queries is up to BLOCK_M (token, head) pairs of one sequence and one KV head, so that each
key and value is read once for all heads that share it. Tiles are as large for one token as for
many: smaller ones might compile to other instructions, with other roundings.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.base import Int32Array
from localllm.backends.cuda.kernels.paged import PagedCache, page_strides

SPLIT = 256
BLOCK_M = 64
BLOCK_POSITIONS = 64
WIDE_HEAD_BYTES = 512  # of a key and a value; wider ones leave shared memory for fewer positions


@triton.jit
def _fold(m, total, acc, m_part, total_part, acc_part):
    """Adds a part of the softmax to another; parts without a position have m -inf and total 0."""
    m_new = tl.maximum(m, m_part)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    keep, gain = tl.exp(m - base), tl.exp(m_part - base)
    total_new = total * keep + total_part * gain
    return m_new, total_new, acc * keep[:, None] + acc_part * gain[:, None]


@triton.jit
def _divide(m, total, acc, sinks, heads, valid, HAS_SINKS: tl.constexpr):
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, sink)
        keep = tl.exp(m - m_new)
        total = total * keep + tl.exp(sink - m_new)
        acc = acc * keep[:, None]
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _load_page_rows(
    pages, scales, blocks, tokens, kv_head, block_stride, token_stride, head_stride,
    scale_block, scale_token, scale_head, mask, COMPUTE: tl.constexpr, QUANTIZED: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values of some positions, [positions, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    at = blocks * block_stride + tokens * token_stride + kv_head * head_stride
    inside = mask[:, None] & (d < DIM)[None, :]
    rows = tl.load(pages + at[:, None] + d[None, :], mask=inside, other=0)
    if QUANTIZED:
        at = blocks * scale_block + tokens * scale_token + kv_head * scale_head
        scale = tl.load(scales + at[:, None] + (d // 32)[None, :], mask=inside, other=0.0)
        return (rows.to(tl.float32) * scale.to(tl.float32)).to(COMPUTE)
    else:
        return rows.to(COMPUTE)


@triton.jit(do_not_specialize=["n_splits"])
def _attend_kernel(
    q, keys, values, key_scales, value_scales, out, part_acc, part_ml, sinks,
    block_table, positions, tiles,
    q_stride, out_stride, table_stride, n_splits, scale, softcap, window,
    key_block, key_token, key_head, value_block, value_token, value_head,
    key_scale_block, key_scale_token, key_scale_head,
    value_scale_block, value_scale_token, value_scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, POSITIONS: tl.constexpr, SPLIT_LEN: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 3)
    if sequence < 0:
        return
    first_token, end_token = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)

    row = tl.arange(0, BLOCK_ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = token < end_token
    position = tl.load(positions + token, mask=valid, other=-1)
    highest = tl.load(positions + end_token - 1)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(tl.load(positions + first_token) - window + 1, 0)

    d = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * q_stride + head * DIM
    inside = valid[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)

    m = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    first_split, last_split = lowest // SPLIT_LEN, highest // SPLIT_LEN
    if SIDE_BY_SIDE:
        split = tl.program_id(2)
        if (split < first_split) | (split > last_split):
            return
        first_split, last_split = split, split

    for s in range(first_split, last_split + 1):
        m_part = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total_part = tl.zeros((BLOCK_ROWS,), tl.float32)
        acc_part = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
        start = tl.maximum(s * SPLIT_LEN, lowest // POSITIONS * POSITIONS)
        end = tl.minimum((s + 1) * SPLIT_LEN, highest + 1)
        for base in range(start, end, POSITIONS):
            at_position = base + tl.arange(0, POSITIONS)
            read = (at_position >= lowest) & (at_position <= highest)
            table = block_table + sequence * table_stride + at_position // BLOCK_TOKENS
            blocks = tl.load(table, mask=read, other=0).to(tl.int64)
            tokens = at_position % BLOCK_TOKENS
            k = _load_page_rows(
                keys, key_scales, blocks, tokens, kv_head, key_block, key_token, key_head,
                key_scale_block, key_scale_token, key_scale_head, read,
                q.dtype.element_ty, QUANTIZED, DIM, BLOCK_D,
            )  # fmt: skip
            none = tl.zeros((BLOCK_ROWS, POSITIONS), tl.float32)
            scores = tl.dot(queries, tl.trans(k), none, input_precision="ieee") * scale
            if CAPPED:
                e = tl.exp(-2.0 * tl.abs(scores) / softcap)
                tanh = (1.0 - e) / (1.0 + e)
                scores = softcap * tl.where(scores < 0, -tanh, tanh)
            seen = (at_position[None, :] <= position[:, None]) & read[None, :]
            if WINDOWED:
                seen &= at_position[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))

            m_new = tl.maximum(m_part, tl.max(scores, axis=1))
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights = tl.exp(scores - reference[:, None])
            keep = tl.exp(m_part - reference)
            total_part = total_part * keep + tl.sum(weights, axis=1)
            v = _load_page_rows(
                values, value_scales, blocks, tokens, kv_head,
                value_block, value_token, value_head,
                value_scale_block, value_scale_token, value_scale_head, read,
                q.dtype.element_ty, QUANTIZED, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
            acc_part = tl.dot(
                weights.to(q.dtype.element_ty), v, acc_part * keep[:, None],
                input_precision="ieee",
            )  # fmt: skip
            m_part = m_new
        if SIDE_BY_SIDE:
            m, total, acc = m_part, total_part, acc_part
        else:
            m, total, acc = _fold(m, total, acc, m_part, total_part, acc_part)

    e = tl.arange(0, BLOCK_V)
    inside = valid[:, None] & (e < VALUE_DIM)[None, :]
    if SIDE_BY_SIDE:
        place = (token.to(tl.int64) * HEADS + head) * n_splits + tl.program_id(2)
        tl.store(part_ml + place * 2, m, mask=valid)
        tl.store(part_ml + place * 2 + 1, total, mask=valid)
        tl.store(part_acc + place[:, None] * VALUE_DIM + e[None, :], acc, mask=inside)
    else:
        answer = _divide(m, total, acc, sinks, head, valid, HAS_SINKS)
        at = token.to(tl.int64) * out_stride + head * VALUE_DIM
        tl.store(out + at[:, None] + e[None, :], answer.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_splits"])
def _fold_splits_kernel(
    part_acc, part_ml, out, sinks, positions, out_stride, n_splits, window,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT_LEN: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    position = tl.load(positions + token)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0)
    e = tl.arange(0, BLOCK_V)[None, :]
    m = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_V), tl.float32)
    for s in range(lowest // SPLIT_LEN, position // SPLIT_LEN + 1):
        place = (token * HEADS + head) * n_splits + s
        acc_part = tl.load(part_acc + place[:, None] * VALUE_DIM + e, mask=e < VALUE_DIM, other=0.0)
        m_part, total_part = tl.load(part_ml + place * 2), tl.load(part_ml + place * 2 + 1)
        m, total, acc = _fold(m, total, acc, m_part, total_part, acc_part)
    answer = _divide(m, total, acc, sinks, head, head < HEADS, HAS_SINKS)
    at = token * out_stride + head * VALUE_DIM
    tl.store(out + at[:, None] + e, answer.to(out.dtype.element_ty), mask=e < VALUE_DIM)


@dataclass(frozen=True)
class AttentionShape:
    """What an `Attention` op says of one layer."""

    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def query_tiles(query_start: Int32Array, heads: int, kv_heads: int) -> Int32Array:
    """The tiles of a step, [tiles, 3]: sequence, first token, the token after the last.

    A tile of sequence -1 is skipped, so a list may be padded to a fixed length.
    """
    per_tile = _block_rows(heads // kv_heads) // (heads // kv_heads)
    tiles = [
        (s, first, min(first + per_tile, int(end)))
        for s, (start, end) in enumerate(pairwise(query_start))
        for first in range(int(start), int(end), per_tile)
    ]
    return np.array(tiles, np.int32).reshape(-1, 3)


def n_splits(context: int) -> int:
    return -(-context // SPLIT)


def attend(
    shape: AttentionShape,
    q: Tensor,
    cache: PagedCache,
    out: Tensor,
    *,
    block_table: Tensor,
    positions: Tensor,
    tiles: Tensor,
    sinks: Tensor | None = None,
    side_by_side: int = 0,
) -> None:
    """Attention of q [T, heads * dim] over the cache, which holds the step's own keys too.

    Products are taken in q's type. block_table int32 [S, B], positions int32 [T], tiles as
    `query_tiles` makes them. `side_by_side` > 0 is the number of splits that the longest sequence
    has (`n_splits`): they run in parallel, which pays where there are few tiles.
    """
    if len(q) == 0 or len(tiles) == 0:
        return
    key_dim, value_dim = cache.keys.shape[3], cache.values.shape[3]
    group = shape.heads // cache.kv_heads
    part_acc = part_ml = None
    if side_by_side:
        parts = (len(q), shape.heads, side_by_side)
        part_acc = torch.empty((*parts, value_dim), dtype=torch.float32, device=q.device)
        part_ml = torch.empty((*parts, 2), dtype=torch.float32, device=q.device)
    windowed, block_d, block_v = shape.window is not None, _block(key_dim), _block(value_dim)
    wide = (block_d + block_v) * q.element_size() > WIDE_HEAD_BYTES
    _attend_kernel[(len(tiles), cache.kv_heads, side_by_side or 1)](
        q, cache.keys, cache.values, cache.key_scales, cache.value_scales,
        out, part_acc, part_ml, sinks, block_table, positions, tiles,
        q.stride(0), out.stride(0), block_table.stride(0), side_by_side,
        shape.scale, shape.softcap or 1.0, shape.window or 0,
        *page_strides(cache.keys), *page_strides(cache.values),
        *page_strides(cache.key_scales), *page_strides(cache.value_scales),
        HEADS=shape.heads, GROUP=group, DIM=key_dim, BLOCK_D=block_d,
        VALUE_DIM=value_dim, BLOCK_V=block_v, BLOCK_TOKENS=cache.keys.shape[1],
        BLOCK_ROWS=_block_rows(group), SPLIT_LEN=SPLIT,
        POSITIONS=BLOCK_POSITIONS // 2 if wide else BLOCK_POSITIONS,
        SIDE_BY_SIDE=side_by_side > 0, WINDOWED=windowed, CAPPED=shape.softcap is not None,
        HAS_SINKS=sinks is not None, QUANTIZED=cache.quantized,
        num_warps=8 if wide else 4, num_stages=1 if wide else 2, enable_fp_fusion=False,
    )  # fmt: skip
    if side_by_side:
        _fold_splits_kernel[(len(q), shape.heads)](
            part_acc, part_ml, out, sinks, positions, out.stride(0), side_by_side,
            shape.window or 0,
            HEADS=shape.heads, VALUE_DIM=value_dim, BLOCK_V=block_v, SPLIT_LEN=SPLIT,
            WINDOWED=windowed, HAS_SINKS=sinks is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _block_rows(group: int) -> int:
    return max(BLOCK_M, int(triton.next_power_of_2(group)))


def _block(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))
