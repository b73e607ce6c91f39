"""One token per logit row, as `SamplingParams` and `SamplingArrays` define it."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.cpu.kernel import CACHE_LINE
from localllm.backends.cpu.kernels.arguments import Arguments

BUCKETS = 2048  # of a selection's histograms


@dataclass(frozen=True)
class SampleArgs(Arguments):
    """Words of `sample`, whose parameters come from the step header's sampling arrays.

    A row whose logits hold NaN or +inf gives token -1. The logits are not changed.
    """

    logits: int  # float32 [R, vocab]
    logits_stride: int
    vocab: int
    tokens: int  # out, int32 [R]
    scratch: int  # aligned to 64
    scratch_bytes: int  # per thread: `scratch_bytes(vocab)`


def scratch_bytes(vocab: int) -> int:
    """Bytes that a thread needs: logits, weights and candidates of one row, and histograms."""
    row = -(-vocab * 4 // CACHE_LINE) * CACHE_LINE
    return 3 * row + 4 * BUCKETS * 8
