"""Sampling by the largest of each eight logits, which the output matrix leaves beside them.

An eighth of the row is read: the largest logit is in the block with the largest maximum, and the k
largest are in the blocks whose maximum is at least the k-th largest maximum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.kernels.sampling_select import Row, lowest_bit
from localllm.backends.cpu.simd import (
    lanes_below,
    load_masked_f32x8,
    mask_bits,
    max_f32,
    maximum,
    scalar_load_f32,
    scalar_store_f32,
    scalar_store_i32,
    select,
    splat_f32x8,
    store_f32x8,
)

MOST_CANDIDATES = 128  # for more, finding the k-th maximum takes longer than it saves
DAMAGED = -1


@helper
def load_or_least(values: int, first: int, count: int) -> Any:
    """Eight of `count` float32, -inf past the last."""
    mask = lanes_below(count - first)
    return select(mask, load_masked_f32x8(values, first * 4, mask), splat_f32x8(-np.inf))


@helper
def largest(values: int, count: int) -> int:
    """The first place of the largest value; DAMAGED if there is NaN, +inf or nothing above -inf."""
    top, sound = splat_f32x8(-np.inf), lanes_below(8)
    for i in range(0, count, 8):
        z = load_or_least(values, i, count)
        top = maximum(z, top)
        sound &= z < splat_f32x8(np.inf)  # false for NaN
    most = max_f32(top)
    if mask_bits(sound) != 255 or most == -np.inf:
        return DAMAGED
    place = 0
    while scalar_load_f32(values, place * 4) != most:
        place += 1
    return place


@helper
def largest_of_blocks(logits: int, maxima: int, blocks: int) -> int:
    """What `largest` finds among the logits."""
    block = largest(maxima, blocks)
    if block == DAMAGED:
        return DAMAGED
    most, token = scalar_load_f32(maxima, block * 4), block * 8
    while scalar_load_f32(logits, token * 4) != most:
        token += 1
    return token


@helper
def gather_candidates(row: Row, logits: int, maxima: int, blocks: int, most: int) -> int:
    """Fills row.logits with the blocks that hold the `most` largest logits, row.candidates with
    their tokens, both in order of the tokens; returns how many there are."""
    least, found = _least_of_largest(row.weights, maxima, blocks, most), 0
    for first in range(0, blocks, 8):
        bits = mask_bits(load_or_least(maxima, first, blocks) >= splat_f32x8(least))
        while bits != 0:
            block = first + lowest_bit(bits)
            bits &= bits - 1
            if block < blocks:
                values = load_or_least(logits, block * 8, row.vocab)
                store_f32x8(row.logits, found * 4, values + splat_f32x8(0.0))  # -0 becomes 0
                for lane in range(8):
                    scalar_store_i32(row.candidates, (found + lane) * 4, block * 8 + lane)
                found += 8
    return found


@helper
def _least_of_largest(memory: int, values: int, count: int, most: int) -> float:
    """The `most`-th largest of the values, -inf if there are fewer; they are kept in `memory`."""
    for i in range(most):
        scalar_store_f32(memory, i * 4, np.float32(-np.inf))
    for first in range(0, count, 8):
        least = scalar_load_f32(memory, 0)  # they rise
        bits = mask_bits(load_or_least(values, first, count) > splat_f32x8(least))
        while bits != 0:
            _insert(memory, scalar_load_f32(values, (first + lowest_bit(bits)) * 4), most)
            bits &= bits - 1
    kth: float = scalar_load_f32(memory, 0)
    return kth


@helper
def _insert(memory: int, value: float, most: int) -> None:
    """Puts a value among the largest, of which the least goes."""
    if value <= scalar_load_f32(memory, 0):
        return
    place = 0
    while place + 1 < most and scalar_load_f32(memory, place * 4 + 4) < value:
        scalar_store_f32(memory, place * 4, scalar_load_f32(memory, place * 4 + 4))
        place += 1
    scalar_store_f32(memory, place * 4, value)
