"""StableLM 2."""

from __future__ import annotations

from localllm.backends.program import Value
from localllm.models.parallel import ParallelDecoder


class StableLM(ParallelDecoder):
    """The 12B alone has parallel branches: its file has no second norm."""

    norm_kind = "layer"

    def block(self, x: Value, layer: int) -> Value:
        if not self.tensors.has(f"blk.{layer}.ffn_norm.weight"):
            return super().block(x, layer)
        return super(ParallelDecoder, self).block(x, layer)
