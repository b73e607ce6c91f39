"""Recording a program against a file: operations whose weights are checked first."""

from __future__ import annotations

from typing import Literal

from localllm.backends.program import Program, Shard, Value
from localllm.gguf import GGUFFile
from localllm.models.keys import Keys
from localllm.models.tensors import Tensors


class Recorder:
    """Weights go by their names without `.weight`; a `.bias` beside it is used where there is one.

    `layers` counts the layers that are computed, `spare_layers` those that come after them in the
    file (to predict further tokens) and are left out.
    """

    norm_kind: Literal["rms", "layer"] = "rms"

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.keys = Keys(file)
        self.tensors = Tensors(file)
        self.program = Program(self.tensors.shapes)
        self.width = self.keys.count("embedding_length")
        self.vocab = self.tensors.shape("token_embd.weight", 2)[0]
        self.eps = self.keys.positive(
            "attention.layer_norm_rms_epsilon"
            if self.norm_kind == "rms"
            else "attention.layer_norm_epsilon"
        )
        blocks = self.keys.count("block_count")
        if blocks > len(self.tensors.shapes):
            self.keys.refuse("block_count", f"is {blocks}, more than the file has tensors")
        self.spare_layers = self.keys.count("nextn_predict_layers", 0, low=0)
        if self.spare_layers >= blocks:
            self.keys.refuse("nextn_predict_layers", f"is {self.spare_layers} of {blocks} layers")
        self.layers = blocks - self.spare_layers

    def norm(self, x: Value, name: str) -> Value:
        """Norm of whole rows."""
        return self.program.norm(
            x,
            self.tensors.need(f"{name}.weight", x.width),
            self.eps,
            bias=self.tensors.optional(f"{name}.bias", x.width),
            kind=self.norm_kind,
        )

    def head_norm(self, x: Value, name: str, head_dim: int) -> Value:
        """Norm of each head by one vector or by one a head, or of whole rows: the shape tells."""
        weight = f"{name}.weight"
        shape = self.tensors.shapes.get(weight)
        if shape == (head_dim,) or shape == (x.width // head_dim, head_dim):
            return self.program.norm(x, weight, self.eps, kind=self.norm_kind, group=head_dim)
        self.tensors.need(weight, x.width)
        return self.program.norm(x, weight, self.eps, kind=self.norm_kind)

    def linear(self, x: Value, *outputs: tuple[str, int], shard: Shard) -> Value:
        """Product with one or several matrices, each given by its name and number of rows."""
        weights = [self.tensors.need(f"{name}.weight", rows, x.width) for name, rows in outputs]
        biases = [self.tensors.optional(f"{name}.bias", rows) for name, rows in outputs]
        return self.program.linear(x, *weights, shard=shard, biases=biases)

    def kept(self, x: Value, layer: int) -> Value:
        """In the last layer, only the rows that need logits: the rest has served its purpose."""
        return self.program.select_rows(x) if layer == self.layers - 1 else x
