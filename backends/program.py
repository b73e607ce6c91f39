"""The op vocabulary: a model is recorded once as a flat list of these and then compiled.

Every value is a float32 matrix [rows, width]; `rows` is symbolic: "T", the tokens of the step, or
"R", the rows that need logits. A value may be a window of columns in a wider buffer, so that
splitting a fused projection costs nothing: row i starts at `i * stride + offset` of its buffer.

Weights are named as in the GGUF file. Their shapes are numpy order, output rows first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = Literal["T", "R"]
# How a matrix is divided among devices; "none": every device has all of it.
Shard: TypeAlias = Literal["column", "row", "vocab", "none"]
ActivationName: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
FloatArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Value:
    """Columns offset..offset+width of buffer number `buffer`, whose rows are `stride` wide."""

    buffer: int
    offset: int
    width: int
    stride: int
    rows: Rows


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Rotary frequencies of one layer kind; identity matters: ops that share it share cos/sin.

    Dimension pair j of a head is rotated by `position * inv_freq[j]` (float64 product), and both
    cos and sin are multiplied by `scale` (YaRN's attention factor). `len(inv_freq) * 2` leading
    dimensions of the head rotate, the rest pass through. `interleaved` pairs (2j, 2j+1), else
    (j, j + rotated/2).
    """

    inv_freq: npt.NDArray[np.float64]
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class Embed:
    """out[t] = weight[ids[t] - first_row]; the weight may also be the tied output matrix.

    Where ranks share the rows, ids below `first_row` or past the weight's end give zeros.
    """

    out: Value
    weight: str
    first_row: int = 0


@dataclass(frozen=True)
class Norm:
    """RMS or layer norm over each run of `group` columns (group == width: the whole row).

    out = normalized(x) * weight + bias; the weight has `group` entries (shared by all runs) or
    `width` entries, or is None.
    """

    out: Value
    x: Value
    weight: str | None
    bias: str | None
    eps: float
    kind: Literal["rms", "layer"]
    group: int


@dataclass(frozen=True)
class Linear:
    """out = concat_i(x @ weights[i].T + biases[i]); several weights since files mix formats."""

    out: Value
    x: Value
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    shard: Shard


@dataclass(frozen=True)
class Add:
    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Scale:
    out: Value
    x: Value
    factor: float


@dataclass(frozen=True)
class Softcap:
    """out = cap * tanh(x / cap)."""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True)
class Rope:
    out: Value
    x: Value
    head_dim: int
    table: RopeTable


@dataclass(frozen=True)
class PositionScale:
    """out[t] = x[t] * (1 + beta * log(1 + floor((position[t] + offset) / floor_scale)))."""

    out: Value
    x: Value
    beta: float
    floor_scale: float
    offset: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Stores k and v of the step's tokens in the paged cache, then attends causally over it.

    Keys and values are rounded to float16 in the cache (the reference backend may keep float32).
    `layer` counts the attention layers of KV group `group` from 0. Query head h reads KV head
    `h * kv_heads // heads`. A `window` of w lets position p see positions p-w+1..p. Scores are
    scaled by `scale`, then soft-capped when `softcap` is set. `sinks` names a weight [heads] of
    logits that join the softmax's denominator.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    layer: int
    group: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None = None


@dataclass(frozen=True)
class Activation:
    out: Value
    x: Value
    act: ActivationName


@dataclass(frozen=True)
class ActMul:
    """out = act(gate) * up."""

    out: Value
    gate: Value
    up: Value
    act: ActivationName


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: routes each row to `used` of the experts and sums their answers.

    `logits` are the router's outputs [rows, experts]. `gating` turns them into weights over all
    experts; the `used` largest are taken (ties: lower index), renormalized to sum 1 if
    `normalize`, times `scale`. Weights gate, up [experts, ffn, width] and down
    [experts, width, ffn]; the sum runs in order of falling router weight.
    """

    out: Value
    x: Value
    logits: Value
    gate: str
    up: str
    down: str
    used: int
    act: ActivationName
    gating: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0


@dataclass(frozen=True)
class SelectRows:
    """out = x[logit_rows]: from here on only the rows that need logits are computed."""

    out: Value
    x: Value


@dataclass(frozen=True)
class AllReduce:
    """out = the sum of the x of all `ranks` tensor ranks of the stage, added in rank order."""

    out: Value
    x: Value
    ranks: int


@dataclass(frozen=True)
class AllGather:
    """out = the columns of all tensor ranks' x side by side; rank r's x is widths[r] wide."""

    out: Value
    x: Value
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Receive:
    """out = what the same tensor rank of the stage before sends."""

    out: Value


@dataclass(frozen=True)
class Send:
    """out = x, which also goes to the same tensor rank of the stage after."""

    out: Value
    x: Value


Op: TypeAlias = (
    Embed
    | Norm
    | Linear
    | Add
    | Scale
    | Softcap
    | Rope
    | PositionScale
    | Attention
    | Activation
    | ActMul
    | Moe
    | SelectRows
    | AllReduce
    | AllGather
    | Receive
    | Send
)


@dataclass(frozen=True)
class KVLayer:
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass
class KVGroup:
    """Attention layers that share block tables: all global, or all with one window."""

    window: int | None
    layers: list[KVLayer] = field(default_factory=list)


class Program:
    """Records ops. `shapes` holds every tensor of the file, so that builders can ask for it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.ops: list[Op] = []
        self.buffers: list[tuple[int, Rows]] = []  # width and row kind of each buffer
        self.kv_groups: list[KVGroup] = []
        self.logits: Value | None = None  # set by `finish`; only the last stage has them

    def has(self, weight: str) -> bool:
        return weight in self.shapes

    def optional(self, weight: str) -> str | None:
        return weight if weight in self.shapes else None

    def embed(self, weight: str) -> Value:
        out = self.new_value(self.shapes[weight][1], "T")
        self.ops.append(Embed(out, weight))
        return out

    def norm(
        self,
        x: Value,
        weight: str | None,
        eps: float,
        *,
        bias: str | None = None,
        kind: Literal["rms", "layer"] = "rms",
        group: int | None = None,
    ) -> Value:
        out = self.new_value(x.width, x.rows)
        self.ops.append(Norm(out, x, weight, bias, eps, kind, group or x.width))
        return out

    def linear(
        self, x: Value, *weights: str, shard: Shard, biases: Sequence[str | None] = ()
    ) -> Value:
        """Biases default to the weights' own `….bias` where the file has it."""
        found = tuple(biases) or tuple(
            self.optional(w.removesuffix(".weight") + ".bias") for w in weights
        )
        out = self.new_value(sum(self.shapes[w][0] for w in weights), x.rows)
        self.ops.append(Linear(out, x, weights, found, shard))
        return out

    def split(self, x: Value, *widths: int) -> list[Value]:
        """Adjacent windows of x's columns; records nothing."""
        if sum(widths) != x.width:
            raise ValueError(f"cannot split {x.width} columns into {widths}")
        parts, at = [], x.offset
        for width in widths:
            parts.append(Value(x.buffer, at, width, x.stride, x.rows))
            at += width
        return parts

    def add(self, a: Value, b: Value) -> Value:
        out = self.new_value(a.width, a.rows)
        self.ops.append(Add(out, a, b))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        if factor == 1.0:
            return x
        out = self.new_value(x.width, x.rows)
        self.ops.append(Scale(out, x, factor))
        return out

    def softcap(self, x: Value, cap: float | None) -> Value:
        if not cap:
            return x
        out = self.new_value(x.width, x.rows)
        self.ops.append(Softcap(out, x, cap))
        return out

    def rope(self, x: Value, head_dim: int, table: RopeTable) -> Value:
        out = self.new_value(x.width, x.rows)
        self.ops.append(Rope(out, x, head_dim, table))
        return out

    def position_scale(
        self, x: Value, beta: float, floor_scale: float, offset: float = 0.0
    ) -> Value:
        out = self.new_value(x.width, x.rows)
        self.ops.append(PositionScale(out, x, beta, floor_scale, offset))
        return out

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        head_dim: int,
        scale: float,
        value_dim: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: str | None = None,
    ) -> Value:
        value_dim = value_dim or head_dim
        heads, kv_heads = q.width // head_dim, k.width // head_dim
        group, layer = self._kv_layer(window, KVLayer(kv_heads, head_dim, value_dim))
        out = self.new_value(heads * value_dim, q.rows)
        self.ops.append(
            Attention(
                out, q, k, v, layer, group, head_dim, value_dim, scale, window, softcap, sinks
            )
        )
        return out

    def activation(self, x: Value, act: ActivationName) -> Value:
        out = self.new_value(x.width, x.rows)
        self.ops.append(Activation(out, x, act))
        return out

    def act_mul(self, gate: Value, up: Value, act: ActivationName) -> Value:
        out = self.new_value(gate.width, gate.rows)
        self.ops.append(ActMul(out, gate, up, act))
        return out

    def moe(
        self,
        x: Value,
        logits: Value,
        *,
        gate: str,
        up: str,
        down: str,
        used: int,
        act: ActivationName = "silu",
        gating: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
    ) -> Value:
        out = self.new_value(x.width, x.rows)
        self.ops.append(Moe(out, x, logits, gate, up, down, used, act, gating, normalize, scale))
        return out

    def select_rows(self, x: Value) -> Value:
        out = self.new_value(x.width, "R")
        self.ops.append(SelectRows(out, x))
        return out

    def finish(self, logits: Value) -> None:
        self.logits = logits

    def weights(self) -> list[str]:
        """Names of all weights that the ops use, each once, in order of first use."""
        names: dict[str, None] = {}
        for op in self.ops:
            for name in op_weights(op):
                names[name] = None
        return list(names)

    def vectors(self) -> set[str]:
        """Names of the weights that are used as float32 vectors, by what the ops do with them."""
        names: set[str | None] = set()
        for op in self.ops:
            if isinstance(op, Norm):
                names |= {op.weight, op.bias}
            elif isinstance(op, Linear):
                names |= set(op.biases)
            elif isinstance(op, Attention):
                names.add(op.sinks)
        return {name for name in names if name is not None}

    def routers(self) -> set[str]:
        """Names of the matrices that choose experts: a rounding there may choose others."""
        logits = {op.logits.buffer for op in self.ops if isinstance(op, Moe)}
        linears = (op for op in self.ops if isinstance(op, Linear))
        return {name for op in linears if op.out.buffer in logits for name in op.weights}

    def new_value(self, width: int, rows: Rows) -> Value:
        """All columns of a fresh buffer."""
        self.buffers.append((width, rows))
        return Value(len(self.buffers) - 1, 0, width, width, rows)

    def _kv_layer(self, window: int | None, layer: KVLayer) -> tuple[int, int]:
        for index, group in enumerate(self.kv_groups):
            if group.window == window:
                group.layers.append(layer)
                return index, len(group.layers) - 1
        self.kv_groups.append(KVGroup(window, [layer]))
        return len(self.kv_groups) - 1, 0


def op_weights(op: Op) -> list[str]:
    match op:
        case Embed(weight=weight):
            return [weight]
        case Norm(weight=weight, bias=bias):
            return [w for w in (weight, bias) if w]
        case Linear(weights=weights, biases=biases):
            return [*weights, *(b for b in biases if b)]
        case Moe(gate=gate, up=up, down=down):
            return [gate, up, down]
        case Attention(sinks=sinks):
            return [sinks] if sinks else []
        case _:
            return []
