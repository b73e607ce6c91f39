"""One token per logit row, as `SamplingParams` and `SamplingArrays` define it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.backends.cpu.kernel import (
    CACHE_LINE,
    H_LOGIT_ROWS,
    H_SAMPLING,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.kernels.philox import uniform
from localllm.backends.cpu.kernels.sampling_blocks import (
    DAMAGED,
    MOST_CANDIDATES,
    gather_candidates,
    largest,
    largest_of_blocks,
    load_or_least,
)
from localllm.backends.cpu.kernels.sampling_select import (
    HISTOGRAM_BYTES,
    Row,
    fill,
    find,
    sum_weights,
)
from localllm.backends.cpu.simd import (
    lanes_below,
    load_f32x8,
    mask_bits,
    scalar_load_f32,
    scalar_load_i32,
    scalar_load_i64,
    scalar_store_f32,
    scalar_store_i32,
    splat_f32x8,
    store_f32x8,
)


@dataclass(frozen=True)
class SampleArgs(Arguments):
    """Words of `sample`, whose parameters come from the step header's sampling arrays."""

    logits: int  # float32 [R, vocab]; not changed
    logits_stride: int
    vocab: int
    tokens: int  # out, int32 [R]
    scratch: int  # aligned to 64
    scratch_bytes: int  # per thread: `scratch_bytes(vocab)`
    maxima: int = 0  # float32 [R, ceil(vocab / 8)]: the largest of each eight logits, or 0


def scratch_bytes(vocab: int) -> int:
    """Bytes that a thread needs: four arrays of a row's length, and two histograms."""
    return 4 * -(-vocab * 4 // CACHE_LINE) * CACHE_LINE + 2 * HISTOGRAM_BYTES


_LOGITS, _LOGITS_STRIDE, _VOCAB, _TOKENS, _SCRATCH, _SCRATCH_BYTES, _MAXIMA = range(
    FIRST_WORD, FIRST_WORD + 7
)
(
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _MIN_P,
    _REPETITION,
    _PRESENCE,
    _FREQUENCY,
    _SEED,
    _CHOICE,
    _INDEX,
    _BIAS_START,
    _BIAS_IDS,
    _BIAS_VALUES,
    _HISTORY_START,
    _HISTORY_IDS,
    _HISTORY_COUNTS,
    _MASK_ROWS,
    _MASKS,
) = range(H_SAMPLING, H_SAMPLING + 18)
_ALL = 0xFFFFFFFF


@kernel
def sample(args: int, tid: int, nthreads: int) -> None:
    """Draws each row's token; -1 for a row whose logits are NaN, +inf or all -inf."""
    head, vocab = header(args), arg_i64(args, _VOCAB)
    scratch = arg_i64(args, _SCRATCH) + tid * arg_i64(args, _SCRATCH_BYTES)
    row = claim(args, 1)
    while row < arg_i64(head, H_LOGIT_ROWS):
        logits = arg_i64(args, _LOGITS) + row * arg_i64(args, _LOGITS_STRIDE) * 4
        temperature = scalar_load_f32(arg_i64(head, _TEMPERATURE), row * 4)
        work, blocks = _row(scratch, vocab, vocab), (vocab + 7) // 8
        maxima = arg_i64(args, _MAXIMA) + row * blocks * 4
        if arg_i64(args, _MAXIMA) == 0 or _is_adjusted(head, row):
            maxima = 0
        if maxima:
            token = largest_of_blocks(logits, maxima, blocks)
        else:
            _copy(logits, vocab, scratch)
            _adjust(head, row, scratch, vocab)
            _mask(head, row, scratch, vocab)
            token = largest(scratch, vocab)
        if temperature > 0 and token != DAMAGED:
            top = scalar_load_f32(logits if maxima else scratch, token * 4)
            most = scalar_load_i32(arg_i64(head, _TOP_K), row * 4)
            if maxima and 0 < most <= MOST_CANDIDATES:
                found = gather_candidates(work, logits, maxima, blocks, most)
                work = _row(scratch, found, vocab)
            elif maxima:
                _copy(logits, vocab, scratch)
            fill(work, top, temperature)
            token = _draw(head, row, work)
            if work.vocab < vocab:
                token = scalar_load_i32(work.candidates, token * 4)
        scalar_store_i32(arg_i64(args, _TOKENS), row * 4, token)
        row = claim(args, 1)


@helper
def _row(scratch: int, count: int, vocab: int) -> Row:
    """`count` logits at the start of scratch memory for `vocab` of them."""
    row_bytes = (vocab * 4 + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    return Row(
        logits=scratch,
        weights=scratch + row_bytes,
        vocab=count,
        ids=scratch + 2 * row_bytes,
        coarse=scratch + 4 * row_bytes,
        fine=scratch + 4 * row_bytes + HISTOGRAM_BYTES,
        candidates=scratch + 3 * row_bytes,
    )


@helper
def _is_adjusted(head: int, row: int) -> bool:
    """Whether the row has biases, a history or a mask."""
    biases, history = arg_i64(head, _BIAS_START), arg_i64(head, _HISTORY_START)
    n_biases: int = scalar_load_i32(biases, row * 4 + 4) - scalar_load_i32(biases, row * 4)
    n_seen: int = scalar_load_i32(history, row * 4 + 4) - scalar_load_i32(history, row * 4)
    masked: int = scalar_load_i32(arg_i64(head, _MASK_ROWS), row * 4)
    return n_biases > 0 or n_seen > 0 or masked >= 0


@helper
def _copy(logits: int, vocab: int, to: int) -> None:
    zero = splat_f32x8(0.0)
    for i in range(0, vocab, 8):
        store_f32x8(to, i * 4, load_or_least(logits, i, vocab) + zero)  # which turns -0 into 0


@helper
def _adjust(head: int, row: int, logits: int, vocab: int) -> None:
    """Biases, then penalties, in float32."""
    ids, values = arg_i64(head, _BIAS_IDS), arg_i64(head, _BIAS_VALUES)
    start = arg_i64(head, _BIAS_START)
    for i in range(scalar_load_i32(start, row * 4), scalar_load_i32(start, row * 4 + 4)):
        token = scalar_load_i32(ids, i * 4)
        if 0 <= token < vocab:
            biased = scalar_load_f32(logits, token * 4) + scalar_load_f32(values, i * 4)
            scalar_store_f32(logits, token * 4, biased)
    ids, counts = arg_i64(head, _HISTORY_IDS), arg_i64(head, _HISTORY_COUNTS)
    start = arg_i64(head, _HISTORY_START)
    repetition = scalar_load_f32(arg_i64(head, _REPETITION), row * 4)
    presence = scalar_load_f32(arg_i64(head, _PRESENCE), row * 4)
    frequency = scalar_load_f32(arg_i64(head, _FREQUENCY), row * 4)
    for i in range(scalar_load_i32(start, row * 4), scalar_load_i32(start, row * 4 + 4)):
        token, count = scalar_load_i32(ids, i * 4), scalar_load_i32(counts, i * 4)
        if 0 <= token < vocab:
            z = scalar_load_f32(logits, token * 4)
            z = z / repetition if z > 0 else z * repetition
            if count > 0:
                z -= presence + frequency * np.float32(count)
            scalar_store_f32(logits, token * 4, z + np.float32(0.0))


@helper
def _mask(head: int, row: int, logits: int, vocab: int) -> None:
    """-inf for tokens whose bit is not set; most words are all ones or all zeros."""
    number = scalar_load_i32(arg_i64(head, _MASK_ROWS), row * 4)
    if number < 0:
        return
    words = (vocab + 31) // 32
    mask = arg_i64(head, _MASKS) + number * words * 4
    for word in range(words):
        bits = scalar_load_i32(mask, word * 4) & _ALL
        if bits == _ALL:
            continue
        first, end = word * 32, min(word * 32 + 32, vocab)
        if bits == 0 and end == first + 32:
            for i in range(first, end, 8):
                store_f32x8(logits, i * 4, splat_f32x8(-np.inf))
        else:
            for token in range(first, end):
                if (bits >> (token - first)) & 1 == 0:
                    scalar_store_f32(logits, token * 4, np.float32(-np.inf))


@helper
def _draw(head: int, row: int, work: Row) -> int:
    """Every filter keeps a head of the same order, so the lightest one is what they all keep."""
    most = scalar_load_i32(arg_i64(head, _TOP_K), row * 4)
    kept = sum_weights(work)
    if 0 < most < work.vocab:
        kept = find(work, most + 0, np.inf).weight
    top_p = scalar_load_f32(arg_i64(head, _TOP_P), row * 4)
    min_p = scalar_load_f32(arg_i64(head, _MIN_P), row * 4)
    by_min_p = _weight_from(work, min_p) if min_p > 0 else kept
    if top_p < 1:
        # "at least" as "more than the next smaller number"
        kept = min(kept, find(work, work.vocab, np.nextafter(top_p * kept, -1.0)).weight)
    kept = min(kept, by_min_p)
    seed = scalar_load_i64(arg_i64(head, _SEED), row * 8)
    choice = scalar_load_i32(arg_i64(head, _CHOICE), row * 4) & 0xFFFFFFFF
    index = scalar_load_i32(arg_i64(head, _INDEX), row * 4) & 0xFFFFFFFF
    u = uniform(seed, choice, index)
    return find(work, work.vocab, u * kept).token


@helper
def _weight_from(row: Row, smallest: float) -> float:
    """Sum of the weights that are `smallest` or more."""
    total = 0.0
    for first in range(0, row.vocab, 8):
        heavy = load_f32x8(row.weights, first * 4) >= splat_f32x8(smallest)
        if mask_bits(heavy & lanes_below(row.vocab - first)) != 0:
            for token in range(first, min(first + 8, row.vocab)):
                weight = scalar_load_f32(row.weights, token * 4)
                total += weight if weight >= smallest else 0.0
    return total
