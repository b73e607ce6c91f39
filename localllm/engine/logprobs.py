"""Log-probabilities of tokens under the model's own distribution, whatever sampling makes of it."""

from __future__ import annotations

import math

import numpy as np

from localllm.backends.program import FloatArray
from localllm.engine.messages import TokenLogprobs


def token_logprobs(logits: FloatArray, token: int, top: int) -> TokenLogprobs:
    """Of one row of raw logits [vocab]: the token's, and those of the `top` most likely ones.

    All are differences to one and the same sum, so equal logits have equal log-probabilities, and
    the most likely token's is exactly the largest of the top ones.
    """
    row = np.ascontiguousarray(logits)  # on its own: sums do not depend on the neighbours
    largest = row.max()
    total = float(largest) + math.log(np.exp(row - largest).sum(dtype=np.float64))
    return TokenLogprobs(
        token=token,
        logprob=float(row[token]) - total,
        rank=1 + int(np.count_nonzero(row > row[token])),
        top=tuple((best, float(row[best]) - total) for best in _most_likely(row, top)),
    )


def _most_likely(row: FloatArray, count: int) -> list[int]:
    """By falling logit; of equal ones the lower ids."""
    count = min(count, len(row))
    if count == 0:
        return []
    if count == 1:
        return [int(row.argmax())]
    least = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= least)
    order = np.argsort(-row[candidates], kind="stable")
    best: list[int] = candidates[order[:count]].tolist()
    return best
