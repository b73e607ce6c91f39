"""Gemma 1 to 3. Their files hold norm weights with the 1 already added."""

from __future__ import annotations

from functools import cached_property

from localllm.backends.program import RopeTable, Value
from localllm.models.decoder import Decoder
from localllm.models.rope import rope_table
from localllm.models.sliding import SlidingDecoder


class Gemma(Decoder):
    activation = "gelu_tanh"

    def embed(self) -> Value:
        return self.program.scale(super().embed(), self.width**0.5)


class Gemma2(Gemma, SlidingDecoder):
    post_norms = True
    period = 2
    default_window = 4096
    default_logit_softcap = 30.0
    wide_scale_layers = 46  # the 27B divides by the width per head instead of the head's own

    @cached_property
    def local_rope(self) -> RopeTable:
        base = self.keys.positive("rope.freq_base_swa", self.rope_base)
        return rope_table(
            self.rope_dims, base, interleaved=self.interleaved_rope, scaling=self.rope_scaling
        )

    def rope(self, layer: int) -> RopeTable:
        return self.local_rope if self.sliding[layer] else self.full_rope

    def attention_scale(self) -> float:
        if self.layers == self.wide_scale_layers:
            return float((self.width // self.heads) ** -0.5)
        return super().attention_scale()

    def attention_softcap(self) -> float | None:
        return self.keys.positive("attn_logit_softcapping", 50.0)

    def output(self, x: Value) -> Value:
        cap = self.keys.not_negative("final_logit_softcapping", self.default_logit_softcap)
        return self.program.softcap(super().output(x), cap)


class Gemma3(Gemma2):
    head_norms = True
    period = 6
    default_window = 0
    wide_scale_layers = 62
    default_logit_softcap = 0.0

    @cached_property
    def local_rope(self) -> RopeTable:
        base = self.keys.positive("rope.freq_base_swa", 10000.0)
        return rope_table(self.rope_dims, base, interleaved=self.interleaved_rope)

    def attention_softcap(self) -> float | None:
        return None
