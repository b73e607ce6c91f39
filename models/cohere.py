"""Command R and its successors."""

from __future__ import annotations

from localllm.backends.program import RopeTable, Value
from localllm.models.parallel import ParallelDecoder
from localllm.models.sliding import SlidingDecoder


class CommandR(ParallelDecoder):
    norm_kind = "layer"
    interleaved_rope = True

    def output(self, x: Value) -> Value:
        return self.program.scale(super().output(x), self.keys.number("logit_scale", 0.0) or 1.0)


class Cohere2(CommandR, SlidingDecoder):
    """Full layers have no positions at all."""

    period = 4

    def rope(self, layer: int) -> RopeTable | None:
        return self.full_rope if self.sliding[layer] else None
