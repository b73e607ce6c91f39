"""The softmax of attention: weights within a partition, and the folding of partitions.

Scores are powers of two: log2(e) is part of the scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.kernels.attention_layout import (
    HIGH,
    LARGEST,
    LOW,
    STATE_BYTES,
    WEIGHTS,
    Tile,
)
from localllm.backends.cpu.simd import (
    broadcast_f32x8,
    broadcast_f32x16,
    extract,
    float_bits,
    fma,
    int_bits,
    lanes_below,
    lanes_below_16,
    like,
    load_f32x8,
    load_f32x16,
    max_f32,
    maximum,
    scalar_load_f32,
    scalar_load_i64,
    scalar_store_f32,
    select,
    shift_left,
    splat_f32x16,
    store_f32x16,
    store_masked_f32x8,
    sum_f32,
    vexp,
)

LOG2_E = 1.4426950408889634


@helper
def weigh(tile: Tile, scores: int, part: int) -> None:
    """Turns a row's scores into weights relative to its largest; zeroes its sum of values."""
    state = part + tile.part_bytes - STATE_BYTES
    low, high = scalar_load_i64(state, LOW), scalar_load_i64(state, HIGH)
    for at in range(part, state, 64):
        store_f32x16(at, 0, splat_f32x16(0.0))
    if low >= high:
        return
    first, last = low // 16 * 16, -(-high // 16) * 16
    if tile.softcap != 0:
        for i in range(first, last, 16):
            capped = _tanh(load_f32x16(scores, i * 4)) * splat_f32x16(tile.softcap * LOG2_E)
            store_f32x16(scores, i * 4, capped)
    # Positions that the row does not see weigh exactly 0.
    unseen = splat_f32x16(-np.inf)
    seen = select(lanes_below_16(low - first), unseen, load_f32x16(scores, first * 4))
    store_f32x16(scores, first * 4, seen)
    seen = select(lanes_below_16(high - last + 16), load_f32x16(scores, (last - 16) * 4), unseen)
    store_f32x16(scores, (last - 16) * 4, seen)
    top = unseen
    for i in range(first, last, 16):
        top = maximum(load_f32x16(scores, i * 4), top)
    largest = max_f32(top)
    total = splat_f32x16(0.0)
    for i in range(first, last, 16):
        weight = _exp2(load_f32x16(scores, i * 4) - splat_f32x16(largest))
        store_f32x16(scores, i * 4, weight)
        total = total + weight
    scalar_store_f32(state, LARGEST, largest)
    scalar_store_f32(state, WEIGHTS, sum_f32(total))


@helper
def clear_totals(tile: Tile) -> None:
    """A sink is a score that comes before all others and has no value."""
    for row in range(tile.rows):
        total = tile.totals + row * tile.part_bytes
        state = total + tile.part_bytes - STATE_BYTES
        for at in range(total, state, 64):
            store_f32x16(at, 0, splat_f32x16(0.0))
        scalar_store_f32(state, LARGEST, -np.inf)
        scalar_store_f32(state, WEIGHTS, 0.0)
        if tile.sinks != 0:
            sink = scalar_load_f32(tile.sinks, row % tile.rows_per_query * 4)
            scalar_store_f32(state, LARGEST, sink * LOG2_E)
            scalar_store_f32(state, WEIGHTS, 1.0)


@helper
def fold_part(tile: Tile, parts: int) -> None:
    """Adds the rows' parts for one partition to their totals."""
    for row in range(tile.rows):
        part, total = parts + row * tile.part_bytes, tile.totals + row * tile.part_bytes
        state = tile.part_bytes - STATE_BYTES
        if scalar_load_i64(part + state, LOW) < scalar_load_i64(part + state, HIGH):
            before = broadcast_f32x16(total + state, LARGEST)
            here = broadcast_f32x16(part + state, LARGEST)
            largest = maximum(before, here)
            rescale, scale = _exp2(before - largest), _exp2(here - largest)
            for i in range(0, state, 64):
                kept = load_f32x16(total, i) * rescale
                store_f32x16(total, i, fma(load_f32x16(part, i), scale, kept))
            weights = broadcast_f32x16(total + state, WEIGHTS) * rescale
            weights = fma(broadcast_f32x16(part + state, WEIGHTS), scale, weights)
            scalar_store_f32(total + state, LARGEST, extract(largest, 0))
            scalar_store_f32(total + state, WEIGHTS, extract(weights, 0))


@helper
def write_rows(tile: Tile) -> None:
    for row in range(tile.rows):
        query, head = divmod(row, tile.rows_per_query)
        out = tile.out + query * tile.out_bytes + head * tile.value_dim * 4
        total = tile.totals + row * tile.part_bytes
        weights = broadcast_f32x8(total + tile.part_bytes - STATE_BYTES, WEIGHTS)
        for i in range(0, tile.value_dim, 8):
            result = load_f32x8(total, i * 4) / weights
            store_masked_f32x8(out, i * 4, result, lanes_below(tile.value_dim - i))


@helper
def _exp2(x: Any) -> Any:
    """2**x within 1e-7 relative for x <= 0; 0 below -126, NaN of NaN."""
    x = maximum(splat_f32x16(-127.0), x)
    # Adding 1.5 * 2**23 rounds to the nearest integer and leaves it in the low mantissa bits.
    shifted = x + splat_f32x16(12582912.0)
    f = x - (shifted - splat_f32x16(12582912.0))
    # 2**f on +-0.5, fitted for least relative error (2e-9)
    p = fma(f, splat_f32x16(0.00015353361959569156), splat_f32x16(0.0013398875016719103))
    p = fma(p, f, splat_f32x16(0.00961843691766262))
    p = fma(p, f, splat_f32x16(0.055503323674201965))
    p = fma(p, f, splat_f32x16(0.24022647738456726))
    p = fma(p, f, splat_f32x16(0.6931471824645996))
    p = fma(p, f, splat_f32x16(1.0))
    scaled = float_bits(int_bits(p) + shift_left(int_bits(shifted), 23))
    return select(x < splat_f32x16(-126.0), splat_f32x16(0.0), scaled)


@helper
def _tanh(x: Any) -> Any:
    return like(x, 1.0) - like(x, 2.0) / (vexp(x + x) + like(x, 1.0))
