"""The decoder that most families share. A family is a subclass: what it does differently.

Class attributes choose variants that a file does not tell; biases, head norms, fused projections,
experts and a tied output are read off the file's tensors.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from localllm.backends.program import ActivationName, Program, RopeTable, Value
from localllm.gguf import GGUFFile
from localllm.models.recorder import Recorder
from localllm.models.rope import rope_table
from localllm.models.rope_keys import read_rope_factors, read_rope_scaling


class Decoder(Recorder):
    """Layers of x += attention(norm(x)), x += feed_forward(norm(x)) over a residual stream.

    `max_context` is the most positions that a sequence will have.
    """

    activation: ActivationName = "silu"
    interleaved_rope = False
    pre_norms = True
    post_norms = False
    head_norms = False  # whether q and k have to be normalized; else the file decides
    norm_after_rope = False
    # gated: act(gate) * up; fused: the same, gate and up in one matrix; plain: act(up)
    feed_forward_kind: Literal["gated", "fused", "plain"] = "gated"
    normalize_experts = True

    def __init__(self, file: GGUFFile, max_context: int) -> None:
        super().__init__(file)
        keys = self.keys
        trained_context = keys.count("context_length")
        self.heads = keys.count("attention.head_count")
        self.kv_heads = keys.count("attention.head_count_kv", self.heads)
        if self.heads % self.kv_heads:
            keys.refuse("attention.head_count_kv", f"does not divide {self.heads} heads")
        self.head_dim = keys.count("attention.key_length", max(1, self.width // self.heads))
        self.value_dim = keys.count("attention.value_length", self.head_dim)
        self.rope_dims = keys.count("rope.dimension_count", self.head_dim)
        if self.rope_dims % 2 or self.rope_dims > self.head_dim:
            keys.refuse("rope.dimension_count", f"is {self.rope_dims} for heads of {self.head_dim}")
        self.rope_scaling = read_rope_scaling(keys, trained_context)
        self.rope_factors = read_rope_factors(
            self.tensors,
            self.rope_dims,
            long_context=max_context > self.rope_scaling.original_context,
        )
        self.rope_base = keys.positive("rope.freq_base", 10000.0)
        if self.rope_base == 1.0:
            keys.refuse("rope.freq_base", "is 1, which turns all pairs alike")
        self.setup()

    def setup(self) -> None:
        """Reads the family's own keys."""

    @cached_property
    def full_rope(self) -> RopeTable:
        """As the file says. Only made once tensors have confirmed the heads' size."""
        return rope_table(
            self.rope_dims,
            self.rope_base,
            interleaved=self.interleaved_rope,
            scaling=self.rope_scaling,
            factors=self.rope_factors,
        )

    def build(self) -> Program:
        x = self.embed()
        for layer in range(self.layers):
            x = self.block(x, layer)
        self.program.finish(self.output(x))
        self.tensors.refuse_unused(self.program.weights(), self.layers, self.spare_layers)
        return self.program

    def embed(self) -> Value:
        weight = self.tensors.need("token_embd.weight", self.vocab, self.width)
        return self.program.embed(weight)

    def block(self, x: Value, layer: int) -> Value:
        branch = self.attention(self._pre_norm(x, f"blk.{layer}.attn_norm"), layer)
        branch = self._post_norm(branch, f"blk.{layer}.post_attention_norm")
        x = self.join(self.kept(x, layer), branch)
        branch = self.feed_forward(self._pre_norm(x, f"blk.{layer}.ffn_norm"), layer)
        return self.join(x, self._post_norm(branch, f"blk.{layer}.post_ffw_norm"))

    def join(self, x: Value, branch: Value) -> Value:
        """The residual stream with a branch added."""
        return self.program.add(x, branch)

    def attention(self, x: Value, layer: int) -> Value:
        """Of the last layer, only the rows that need logits."""
        q, k, v = self._project(x, layer)
        q = self._place(q, f"blk.{layer}.attn_q_norm", layer)
        k = self._place(k, f"blk.{layer}.attn_k_norm", layer)
        out = self.program.attention(
            self.scale_query(q),
            k,
            v,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            scale=self.attention_scale(),
            window=self.window(layer),
            softcap=self.attention_softcap(),
        )
        out = self.kept(out, layer)
        return self.linear(out, (f"blk.{layer}.attn_output", self.width), shard="row")

    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def attention_softcap(self) -> float | None:
        return None

    def scale_query(self, q: Value) -> Value:
        return q

    def window(self, layer: int) -> int | None:  # noqa: ARG002
        """How many positions a layer sees, its own included; None for all."""
        return None

    def rope(self, layer: int) -> RopeTable | None:  # noqa: ARG002
        """A layer's rotation, None for a layer without. Layers that rotate alike share one."""
        return self.full_rope

    def feed_forward(self, x: Value, layer: int) -> Value:
        if self.tensors.has(f"blk.{layer}.ffn_gate_inp.weight"):
            return self.experts(x, layer)
        hidden = self.keys.count("feed_forward_length")
        gate, up, down = (f"blk.{layer}.ffn_{part}" for part in ("gate", "up", "down"))
        if self.feed_forward_kind == "plain":
            inner = self.linear(x, (up, hidden), shard="column")
            inner = self.program.activation(inner, self.activation)
            return self.linear(inner, (down, self.width), shard="row")
        fused = self.feed_forward_kind == "fused"
        inputs = [(up, 2 * hidden)] if fused else [(gate, hidden), (up, hidden)]
        return self.gated(x, hidden, inputs, down)

    def gated(self, x: Value, hidden: int, inputs: list[tuple[str, int]], down: str) -> Value:
        """down(act(gate) * up); the rows of `inputs` are all of gate, then all of up."""
        both = self.linear(x, *inputs, shard="column")
        gate, up = self.program.split(both, hidden, hidden)
        inner = self.program.act_mul(gate, up, self.activation)
        return self.linear(inner, (down, self.width), shard="row")

    def experts(self, x: Value, layer: int) -> Value:
        count = self.keys.count("expert_count")
        used = self.keys.count("expert_used_count")
        if used > count:
            self.keys.refuse("expert_used_count", f"is {used} of {count} experts")
        blk = f"blk.{layer}"
        _, hidden, _ = self.tensors.shape(f"{blk}.ffn_gate_exps.weight", 3)
        return self.program.moe(
            x,
            self.linear(x, (f"{blk}.ffn_gate_inp", count), shard="none"),
            gate=self.tensors.need(f"{blk}.ffn_gate_exps.weight", count, hidden, self.width),
            up=self.tensors.need(f"{blk}.ffn_up_exps.weight", count, hidden, self.width),
            down=self.tensors.need(f"{blk}.ffn_down_exps.weight", count, self.width, hidden),
            used=used,
            act=self.activation,
            normalize=self.normalize_experts,
        )

    def output(self, x: Value) -> Value:
        x = self.norm(x, "output_norm")
        name = "output.weight" if self.tensors.has("output.weight") else "token_embd.weight"
        return self.program.linear(
            x,
            self.tensors.need(name, self.vocab, self.width),
            shard="vocab",
            biases=[self.tensors.optional("output.bias", self.vocab)],
        )

    def _pre_norm(self, x: Value, name: str) -> Value:
        return self.norm(x, name) if self.pre_norms else x

    def _post_norm(self, x: Value, name: str) -> Value:
        return self.norm(x, name) if self.post_norms else x

    def _project(self, x: Value, layer: int) -> list[Value]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = (q, kv, self.kv_heads * self.value_dim)
        fused = f"blk.{layer}.attn_qkv"
        if self.tensors.has(f"{fused}.weight"):
            qkv = self.linear(x, (fused, sum(widths)), shard="column")
        else:
            names = (f"blk.{layer}.attn_{part}" for part in "qkv")
            qkv = self.linear(x, *zip(names, widths, strict=True), shard="column")
        return self.program.split(qkv, *widths)

    def _place(self, x: Value, norm: str, layer: int) -> Value:
        """Normalizes and rotates the heads of q or k, in the family's order."""
        table = self.rope(layer)
        if table and self.norm_after_rope:
            x, table = self.program.rope(x, self.head_dim, table), None
        if self.head_norms or self.tensors.has(f"{norm}.weight"):
            x = self.head_norm(x, norm, self.head_dim)
        return self.program.rope(x, self.head_dim, table) if table else x
