"""Decoders whose attention and feed-forward read the same normalized input."""

from __future__ import annotations

from localllm.backends.program import Value
from localllm.models.decoder import Decoder


class ParallelDecoder(Decoder):
    """x += attention(norm(x)) + feed_forward(norm(x)), with one norm."""

    def block(self, x: Value, layer: int) -> Value:
        h = self.norm(x, f"blk.{layer}.attn_norm")
        x = self.join(self.kept(x, layer), self.attention(h, layer))
        return self.join(x, self.feed_forward(self.kept(h, layer), layer))
