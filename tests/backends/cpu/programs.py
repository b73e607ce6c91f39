"""Small random programs that between them use every op, and tensors for them in memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from localllm.backends.base import Batch
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray, Program, RopeTable, Value
from localllm.gguf import Tensor, TensorType

Shapes = Mapping[str, tuple[int, ...]]

WIDTH, HEAD, HEADS, KV_HEADS, FFN, VOCAB, EXPERTS = 64, 16, 6, 2, 96, 101, 8
CONTEXT = 200


def make_tensor(name: str, kind: TensorType, values: npt.NDArray[np.float32]) -> Tensor:
    """A tensor as it would lie in a file, at an odd offset."""
    from gguf import GGMLQuantizationType, quants

    raw = quants.quantize(values, GGMLQuantizationType(kind)).tobytes()
    data = mmap.mmap(-1, len(raw) + 32)
    data[32:] = raw
    return Tensor(name, kind, values.shape, len(raw), data, 32)


def nmse(actual: FloatArray, expected: FloatArray) -> float:
    return float(((actual - expected) ** 2).sum() / (expected**2).sum())


def second_halves(run: DirectRunner, sequences: Sequence[Sequence[int]]) -> Batch:
    """Runs a first part of every sequence; returns the batch of all the rest."""
    parts = [(i, 0, tokens[: len(tokens) // 2]) for i, tokens in enumerate(sequences)]
    run.step.submit(run.batch(parts))
    run.step.collect()
    rest = [(i, len(t) // 2, t[len(t) // 2 :]) for i, t in enumerate(sequences)]
    return run.batch(rest)


def random_tensors(
    program: Program, kinds: Callable[[str], TensorType], seed: int = 0
) -> dict[str, Tensor]:
    r = np.random.default_rng(seed)
    tensors = {}
    for name in program.weights():
        shape = program.shapes[name]
        if name.endswith("bias") or name == "sinks":
            values = r.normal(0, 0.5, shape)
        elif len(shape) == 1:
            values = r.normal(1, 0.1, shape)
        else:
            values = r.normal(0, shape[-1] ** -0.5, shape)
        kind = TensorType.F32 if len(shape) == 1 else kinds(name)
        tensors[name] = make_tensor(name, kind, values.astype(np.float32))
    return tensors


def _rope_table(pairs: int, *, interleaved: bool, scale: float = 1.0) -> RopeTable:
    return RopeTable(100.0 ** (-np.arange(pairs) / pairs), scale, interleaved)


def _attention_block(p: Program, x: Value, table: RopeTable, **options: object) -> Value:
    qkv = p.linear(x, "q.weight", "k.weight", "v.weight", shard="column")
    q, k, v = p.split(qkv, HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
    q, k = p.norm(q, "q_norm", 1e-5, group=HEAD), p.norm(k, "k_norm", 1e-5, group=HEAD)
    q, k = p.rope(q, HEAD, table), p.rope(k, HEAD, table)
    out = p.attention(q, k, v, head_dim=HEAD, scale=HEAD**-0.5, **options)  # type: ignore[arg-type]
    return p.add(x, p.linear(out, "out.weight", shard="row"))


_ATTENTION_SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCAB, WIDTH),
    "norm": (WIDTH,),
    "q.weight": (HEADS * HEAD, WIDTH),
    "q.bias": (HEADS * HEAD,),
    "k.weight": (KV_HEADS * HEAD, WIDTH),
    "v.weight": (KV_HEADS * HEAD, WIDTH),
    "q_norm": (HEAD,),
    "k_norm": (HEAD,),
    "out.weight": (WIDTH, HEADS * HEAD),
    "sinks": (HEADS,),
}


def dense() -> Program:
    """Gated feed-forward, windowed and global attention with soft-caps and sinks, tied output."""
    p = Program(
        {
            **_ATTENTION_SHAPES,
            "gate.weight": (FFN, WIDTH),
            "up.weight": (FFN, WIDTH),
            "down.weight": (WIDTH, FFN),
        }
    )
    table = _rope_table(HEAD // 2, interleaved=False, scale=1.1)
    x = p.scale(p.embed("embed.weight"), 2.5)
    for window, softcap, sinks in ((24, None, None), (None, 5.0, None), (None, None, "sinks")):
        h = p.norm(x, "norm", 1e-5)
        x = _attention_block(p, h, table, window=window, softcap=softcap, sinks=sinks)
        h = p.norm(x, "norm", 1e-5)
        gate, up = p.split(p.linear(h, "gate.weight", "up.weight", shard="column"), FFN, FFN)
        x = p.add(x, p.linear(p.act_mul(gate, up, "silu"), "down.weight", shard="row"))
    x = p.norm(p.select_rows(x), "norm", 1e-5)
    p.finish(p.softcap(p.linear(x, "embed.weight", shard="vocab"), 3.0))
    return p


def plain() -> Program:
    """Layer norms with bias, an ungated feed-forward, positions in the query's scale."""
    p = Program(
        {
            **_ATTENTION_SHAPES,
            "norm.bias": (WIDTH,),
            "up.weight": (FFN, WIDTH),
            "up.bias": (FFN,),
            "down.weight": (WIDTH, FFN),
            "output.weight": (VOCAB, WIDTH),
        }
    )
    table = _rope_table(HEAD // 4, interleaved=True)
    x = p.embed("embed.weight")
    for act in ("gelu_tanh", "relu_squared"):
        h = p.norm(x, "norm", 1e-5, bias="norm.bias", kind="layer")
        h = p.position_scale(_attention_block(p, h, table), 0.3, 7.0, 1.0)
        up = p.linear(h, "up.weight", shard="column")
        x = p.add(x, p.linear(p.activation(up, act), "down.weight", shard="row"))
    x = p.norm(p.select_rows(x), None, 1e-5, kind="layer")
    p.finish(p.linear(x, "output.weight", shard="vocab"))
    return p


def experts() -> Program:
    """Mixtures of experts with both gatings."""
    p = Program(
        {
            **_ATTENTION_SHAPES,
            "router.weight": (EXPERTS, WIDTH),
            "gate.weight": (EXPERTS, FFN, WIDTH),
            "up.weight": (EXPERTS, FFN, WIDTH),
            "down.weight": (EXPERTS, WIDTH, FFN),
        }
    )
    moe = partial(p.moe, gate="gate.weight", up="up.weight", down="down.weight")
    table = _rope_table(HEAD // 2, interleaved=False)
    x = _attention_block(p, p.embed("embed.weight"), table)
    logits = p.linear(x, "router.weight", shard="column")
    x = p.add(x, moe(x, logits, used=3))
    logits = p.linear(x, "router.weight", shard="column")
    y = moe(x, logits, used=2, gating="sigmoid", normalize=False, scale=1.5, act="gelu")
    x = p.norm(p.select_rows(p.add(x, y)), "norm", 1e-5)
    p.finish(p.linear(x, "embed.weight", shard="vocab"))
    return p


PROGRAMS: dict[str, Callable[[], Program]] = {"dense": dense, "plain": plain, "experts": experts}
