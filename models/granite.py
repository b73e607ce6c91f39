"""Granite, dense and mixtures, and MiniCPM: Llama with scaled embeddings, branches and logits."""

from __future__ import annotations

from localllm.backends.program import RopeTable, Value
from localllm.models.llama import Llama


class Granite(Llama):
    def setup(self) -> None:
        self.rotated = self.keys.flag("rope.scaling.finetuned", True)
        self.embedding_scale = self.keys.number("embedding_scale", 0.0) or 1.0
        self.residual_scale = self.keys.number("residual_scale", 0.0) or 1.0
        self.logit_divisor = self.keys.positive("logit_scale")

    def embed(self) -> Value:
        return self.program.scale(super().embed(), self.embedding_scale)

    def join(self, x: Value, branch: Value) -> Value:
        return super().join(x, self.program.scale(branch, self.residual_scale))

    def rope(self, layer: int) -> RopeTable | None:
        return super().rope(layer) if self.rotated else None

    def attention_scale(self) -> float:
        return self.keys.number("attention.scale", 0.0) or super().attention_scale()

    def experts(self, x: Value, layer: int) -> Value:
        routed = super().experts(x, layer)
        hidden = self.keys.count("expert_shared_feed_forward_length", 0, low=0)
        if not hidden:
            return routed
        gate, up, down = (f"blk.{layer}.ffn_{part}_shexp" for part in ("gate", "up", "down"))
        shared = self.gated(x, hidden, [(gate, hidden), (up, hidden)], down)
        return self.program.add(routed, shared)

    def output(self, x: Value) -> Value:
        return self.program.scale(super().output(x), 1.0 / self.logit_divisor)


class MiniCPM(Granite):
    """Older files leave the scales out."""

    def setup(self) -> None:
        self.rotated = True
        self.embedding_scale = self.keys.positive("embedding_scale", 12.0)
        self.residual_scale = self.keys.positive("residual_scale", 1.4 / self.layers**0.5)
        self.logit_divisor = self.keys.positive("logit_scale", self.width / 256)
