"""OLMo 2 and 3, and the OLMoE mixture. q and k are normalized over all heads at once."""

from __future__ import annotations

from localllm.backends.program import RopeTable
from localllm.models.decoder import Decoder
from localllm.models.rope import rope_table
from localllm.models.sliding import SlidingDecoder


class Olmo2(SlidingDecoder):
    """Norms follow the branches instead of leading them. OLMo 3 adds windows."""

    pre_norms = False
    post_norms = True
    head_norms = True
    period = 4

    def setup(self) -> None:
        super().setup()
        self.local_rope = rope_table(self.rope_dims, self.rope_base, interleaved=False)

    def rope(self, layer: int) -> RopeTable:
        """Only full layers were stretched to longer contexts."""
        return self.local_rope if self.sliding[layer] else self.full_rope


class Olmoe(Decoder):
    head_norms = True
    normalize_experts = False
