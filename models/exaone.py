"""EXAONE 4."""

from __future__ import annotations

from localllm.backends.program import RopeTable
from localllm.models.sliding import SlidingDecoder


class Exaone4(SlidingDecoder):
    """Norms follow the branches. Only the 32B has windows, and there full layers do not rotate.

    Smaller files may name a window that they do not use.
    """

    pre_norms = False
    post_norms = True
    head_norms = True
    period = 4
    sliding_layers = 64

    def setup(self) -> None:
        super().setup()
        if self.layers != self.sliding_layers:
            self.sliding = [False] * self.layers

    def rope(self, layer: int) -> RopeTable | None:
        return self.full_rope if self.sliding[layer] or not any(self.sliding) else None
