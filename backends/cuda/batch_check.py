"""Whether a batch is good, in a few numpy calls; `check` of the CPU says what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.base import BLOCK_TOKENS, Batch, StepLimits, mask_words
from localllm.backends.cpu.batch_check import PER_ROW, SAMPLING_TYPES, check

_STEP_ARRAYS = (
    "ids", "positions", "query_start", "seq_lens", "logit_rows", "slots", "block_tables",
)  # fmt: skip
_TYPES = [np.dtype(np.int32)] * len(_STEP_ARRAYS) + list(SAMPLING_TYPES.values())
_MOST = 1 << 31  # beyond any int32 that is not negative

_step_arrays = attrgetter(*_STEP_ARRAYS)
_sampling_arrays = attrgetter(*SAMPLING_TYPES)
_row_arrays = attrgetter(*PER_ROW)


class BatchCheck:
    """Of the batches of one step; `n_blocks` are those of each KV group."""

    def __init__(self, limits: StepLimits, vocab: int, n_blocks: Sequence[int]) -> None:
        self._limits, self._vocab, self._n_blocks = limits, vocab, n_blocks
        self._mask_words = mask_words(vocab)
        self._ends = lru_cache(maxsize=64)(self._make_ends)

    def __call__(self, batch: Batch) -> None:
        """Raises a ValueError that says what is wrong with the batch, if anything is."""
        if not (self._has_shape(batch) and self._is_inside(batch)):
            check(batch, self._limits, self._vocab, self._n_blocks)

    def _has_shape(self, batch: Batch) -> bool:
        """False for biases and penalties too, whose ranges are looked at one by one."""
        limits, sampling = self._limits, batch.sampling
        arrays = chain(_step_arrays(batch), _sampling_arrays(sampling))
        tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
        ids = (sampling.bias_ids, sampling.history_ids)
        values = (sampling.bias_values, sampling.history_counts)
        return (
            [array.dtype for array in arrays] == _TYPES
            and 0 < tokens <= limits.tokens
            and 0 < seqs <= limits.seqs
            and rows <= limits.logit_rows
            and batch.ids.shape == batch.positions.shape == (tokens,)
            and batch.query_start.shape == (seqs + 1,)
            and batch.seq_lens.shape == (seqs,)
            and batch.logit_rows.shape == (rows,)
            and batch.slots.shape == (len(self._n_blocks), tokens)
            and batch.block_tables.shape[:-1] == (len(self._n_blocks), seqs)
            and {array.shape for array in _row_arrays(sampling)} == {(rows,)}
            and sampling.bias_start.shape == sampling.history_start.shape == (rows + 1,)
            and not any(array.size for array in chain(ids, values))
            and sampling.masks.size % self._mask_words == 0
        )

    def _is_inside(self, batch: Batch) -> bool:
        sampling, starts = batch.sampling, batch.query_start
        tokens, seqs, rows = batch.ids.size, batch.seq_lens.size, batch.logit_rows.size
        numbers = np.concatenate((
            batch.ids, batch.positions, batch.seq_lens, batch.logit_rows, batch.slots.reshape(-1),
            sampling.bias_start, sampling.history_start, sampling.mask_rows + 1,
        ))  # fmt: skip
        ends = self._ends(tokens, seqs, rows, sampling.masks.size // self._mask_words)
        # Negative numbers are large ones without a sign.
        inside = bool((numbers.view(np.uint32) < ends).all())
        tables = zip(batch.block_tables, self._n_blocks, strict=True)
        return (
            inside
            and starts[0] == 0
            and starts[-1] == tokens
            and all(int(table.max(initial=-1)) < most for table, most in tables)
        )

    def _make_ends(
        self, tokens: int, seqs: int, rows: int, masks: int
    ) -> npt.NDArray[np.unsignedinteger[Any]]:
        """What each of the numbers stays below."""
        context = self._limits.context
        slots = [min(most * BLOCK_TOKENS, _MOST) for most in self._n_blocks]
        ends = [self._vocab, context, context + 1, tokens, *slots, 1, masks + 1]
        sizes = [tokens, tokens, seqs, rows, *[tokens] * len(slots), 2 * rows + 2, rows]
        return np.repeat(np.array(ends, np.uint32), sizes)
