"""OLMo 2 and 3, and the OLMoE mixture. q and k are normalized over all heads at once."""

from __future__ import annotations

from functools import cached_property

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

    @cached_property
    def local_rope(self) -> RopeTable:
        return rope_table(self.rope_dims, self.rope_base, interleaved=self.interleaved_rope)

    def rope(self, layer: int) -> RopeTable:
        """Only full layers were stretched to longer contexts."""
        return self.local_rope if self.sliding[layer] else self.full_rope


class Olmoe(Decoder):
    head_norms = True
    normalize_experts = False
