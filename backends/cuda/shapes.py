"""The shapes that steps have: what a launch depends on follows from them alone.

A step of one new token per sequence is filled up to a `StepShape` of a short list, one graph each.
Block tables are as wide, and attention is cut into as many splits, as a context of `context` wants.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS, Batch, StepLimits

SMALLEST_CONTEXT = 2048
CONTEXT_FACTOR = 4
_CONTEXT_UNIT = 256  # tokens; widths of tables are then multiples of 16


@dataclass(frozen=True)
class StepShape:
    tokens: int
    seqs: int
    rows: int  # of logits
    context: int

    @property
    def table(self) -> int:
        """Blocks that a sequence may have."""
        return self.context // BLOCK_TOKENS


class Shapes:
    def __init__(self, limits: StepLimits) -> None:
        self.most_seqs = min(limits.seqs, limits.tokens, limits.logit_rows)
        self.most_context = -(-limits.context // _CONTEXT_UNIT) * _CONTEXT_UNIT

    def of(self, batch: Batch) -> StepShape:
        """The shape of a step as it is, all but the context."""
        context = self._context(int(batch.seq_lens.max()))
        return StepShape(batch.ids.size, batch.seq_lens.size, batch.logit_rows.size, context)

    def filled(self, shape: StepShape) -> StepShape | None:
        """The shape of the list that holds a step; None for one that has no graph."""
        if shape.tokens != shape.seqs or shape.seqs > self.most_seqs or shape.rows > shape.seqs:
            return None
        seqs = min(1 << (shape.seqs - 1).bit_length(), self.most_seqs)
        return StepShape(seqs, seqs, seqs, shape.context)

    def seqs(self) -> list[int]:
        """Of all shapes with a graph, rising."""
        powers = [1 << i for i in range(self.most_seqs.bit_length())]
        return sorted({min(n, self.most_seqs) for n in (*powers, self.most_seqs)})

    def smallest_context(self) -> int:
        return self._context(1)

    def _context(self, tokens: int) -> int:
        context = SMALLEST_CONTEXT
        while context < tokens:
            context *= CONTEXT_FACTOR
        return min(context, self.most_context)
