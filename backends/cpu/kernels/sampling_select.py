"""Finds the token at which a running sum over tokens in order of falling logit passes a target.

Nothing is sorted: a histogram over the leading bits of the logits' ranks says in which bucket the
sum passes the target, two more over the following bits narrow that down to equal logits, and among
those the order is that of the ids. A rank is an integer of 32 bits that rises as the logit falls.

Most tokens are so unlikely that the sum hardly ever gets to them. The first histogram is without
these light tokens, of which only the whole weight is known, until a sum ends among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import types

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.simd import (
    as_i32x8,
    f32_to_f64,
    intrinsic,
    lanes_below,
    lanes_below_16,
    load_f32x8,
    load_f32x16,
    mask_bits,
    scalar_load_f32,
    scalar_load_f64,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f64,
    scalar_store_i32,
    scalar_store_i64,
    select,
    shift_right_signed,
    splat_f32x16,
    splat_f64x16,
    splat_i32x8,
    store_f32x16,
    sum_f64,
    vexp,
)

BUCKETS = 2048
HISTOGRAM_BYTES = 16 * BUCKETS + 64  # int64 counts, then float64 weights, then the light tokens'
LIGHT = np.float32(2.0**-16)  # a token with less weight is light; the largest weight is 1
COARSE_SHIFT, _MIDDLE_SHIFT = 21, 10  # a rank's bits: 11 coarse, 11 middle, 10 last
_TOP = 0x7FFFFFFF
_LIGHT_WEIGHT, _HAS_LIGHT = 16 * BUCKETS, 16 * BUCKETS + 8  # offsets in the coarse histogram


class Row(NamedTuple):
    """A row's logits and weights (float32 [vocab]), and memory to select in; all addresses."""

    logits: int
    weights: int
    vocab: int
    ids: int  # int32 [vocab]
    coarse: int  # histogram of the row by the leading bits, from `fill`
    fine: int  # histogram for the levels below
    candidates: int  # int32 [vocab]: the tokens, where the row is a choice of a larger one


class Sum(NamedTuple):
    """The token that made a running sum reach its target, and the sums up to and with it."""

    token: int
    tokens: int
    weight: float


@helper
def clear(histogram: int) -> None:
    for at in range(0, HISTOGRAM_BYTES, 8):
        scalar_store_i64(histogram, at, 0)


@helper
def add(histogram: int, bucket: int, weight: float) -> None:
    count = scalar_load_i64(histogram, bucket * 8)
    scalar_store_i64(histogram, bucket * 8, count + 1)
    total = scalar_load_f64(histogram, (BUCKETS + bucket) * 8)
    scalar_store_f64(histogram, (BUCKETS + bucket) * 8, total + weight)


@helper
def fill(row: Row, largest: float, temperature: float) -> None:
    """Computes the row's weights and the coarse histogram of those that are not light."""
    clear(row.coarse)
    light = splat_f64x16(0.0)
    for first in range(0, row.vocab, 16):
        below = load_f32x16(row.logits, first * 4) - splat_f32x16(largest)
        weights = vexp(below / splat_f32x16(temperature))
        weights = select(lanes_below_16(row.vocab - first), weights, splat_f32x16(0.0))
        store_f32x16(row.weights, first * 4, weights)
        heavy = weights >= splat_f32x16(LIGHT)
        light += f32_to_f64(select(heavy, splat_f32x16(0.0), weights))
        bits = mask_bits(heavy)
        while bits != 0:
            _add_token(row, first + lowest_bit(bits))
            bits &= bits - 1
    scalar_store_f64(row.coarse, _LIGHT_WEIGHT, sum_f64(light))
    scalar_store_i64(row.coarse, _HAS_LIGHT, 1)


@helper
def _fill_light(row: Row) -> None:
    """Adds what `fill` left out."""
    for token in range(row.vocab):
        if scalar_load_f32(row.weights, token * 4) < LIGHT:
            _add_token(row, token)
    scalar_store_f64(row.coarse, _LIGHT_WEIGHT, 0.0)
    scalar_store_i64(row.coarse, _HAS_LIGHT, 0)


@helper
def _add_token(row: Row, token: int) -> None:
    weight = scalar_load_f32(row.weights, token * 4)
    add(row.coarse, rank(row.logits, token) >> COARSE_SHIFT, weight)


@helper
def sum_weights(row: Row) -> float:
    """The weight of the whole row."""
    total = scalar_load_f64(row.coarse, _LIGHT_WEIGHT)
    for bucket in range(BUCKETS):
        total += scalar_load_f64(row.coarse, (BUCKETS + bucket) * 8)
    return total


@helper
def rank(logits: int, token: int) -> int:
    """0 for the largest float32 there is; logits must not be NaN or -0."""
    bits: int = scalar_load_i32(logits, token * 4) + 0
    return _TOP - (bits ^ ((bits >> 31) & _TOP))


@helper
def find(row: Row, most: int, limit: float) -> Sum:
    """The first token at which the running count reaches `most` or the weight exceeds `limit`.

    Where rounding keeps the sum at or below its limit: the last token with a weight.
    """
    bucket, before, reached = _walk(row.coarse, Sum(0, 0, 0.0), most, limit)
    if not reached and scalar_load_i64(row.coarse, _HAS_LIGHT) != 0:
        _fill_light(row)
        bucket, before, _ = _walk(row.coarse, Sum(0, 0, 0.0), most, limit)
    found = _gather(row, bucket)
    for shift in range(_MIDDLE_SHIFT, -1, -_MIDDLE_SHIFT):
        clear(row.fine)
        for i in range(found):
            token = scalar_load_i32(row.ids, i * 4)
            bucket = (rank(row.logits, token) >> shift) & (BUCKETS - 1)
            add(row.fine, bucket, scalar_load_f32(row.weights, token * 4))
        bucket, before, _ = _walk(row.fine, before, most, limit)
        found = _keep(row, found, shift, bucket)
    # What is left are equal logits, by rising id.
    token, count, weight = -1, before.tokens, before.weight
    for i in range(found):
        token = scalar_load_i32(row.ids, i * 4) + 0
        count += 1
        weight += scalar_load_f32(row.weights, token * 4)
        if count >= most or weight > limit:
            break
    return Sum(token, count, weight)


@helper
def _walk(histogram: int, before: Sum, most: int, limit: float) -> tuple[int, Sum, bool]:
    """The bucket in which the running sum comes to an end, the sum before it, and whether it
    ends because it reached its target."""
    count, weight = before.tokens, before.weight
    bucket, sum_before = -1, before
    for i in range(BUCKETS):
        here = scalar_load_i64(histogram, i * 8)
        if here > 0:
            heavier = scalar_load_f64(histogram, (BUCKETS + i) * 8)
            if bucket < 0 or heavier > 0:
                bucket, sum_before = i, Sum(-1, count, weight)
            count += here
            weight += heavier
            if count >= most or weight > limit:
                return bucket, sum_before, True
    return bucket, sum_before, False


@helper
def _gather(row: Row, bucket: int) -> int:
    """Lists the tokens of a coarse bucket by rising id; returns how many they are."""
    # The bucket's ranks as a range of integers that rise with the logit.
    high = splat_i32x8(_TOP - (bucket << COARSE_SHIFT))
    low = splat_i32x8(_TOP - ((bucket + 1) << COARSE_SHIFT) + 1)
    found = 0
    for first in range(0, row.vocab, 8):
        bits = as_i32x8(load_f32x8(row.logits, first * 4))
        order = bits ^ (shift_right_signed(bits, 31) & splat_i32x8(_TOP))
        inside = mask_bits((order >= low) & (order <= high) & lanes_below(row.vocab - first))
        while inside != 0:
            lane = lowest_bit(inside)
            scalar_store_i32(row.ids, found * 4, first + lane)
            found += 1
            inside &= inside - 1
    return found


@helper
def _keep(row: Row, found: int, shift: int, bucket: int) -> int:
    """Keeps those of the listed tokens that are in a bucket of the fine histogram."""
    kept = 0
    for i in range(found):
        token = scalar_load_i32(row.ids, i * 4)
        if (rank(row.logits, token) >> shift) & (BUCKETS - 1) == bucket:
            scalar_store_i32(row.ids, kept * 4, token)
            kept += 1
    return kept


@intrinsic
def lowest_bit(typingctx: Any, bits: Any) -> Any:
    """Index of the lowest bit that is set; there is one."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        word = context.cast(b, args[0], sig.args[0], types.int64)
        return b.cttz(word, ir.Constant(ir.IntType(1), 1))

    return types.int64(bits), build
