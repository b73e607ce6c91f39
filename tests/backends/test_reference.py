"""The oracle's operations against formulas written out, loops and all."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.base import BLOCK_TOKENS, Batch, SamplingArrays, StepLimits
from localllm.backends.program import (
    ActivationName,
    FloatArray,
    KVGroup,
    KVLayer,
    Program,
    RopeTable,
)
from localllm.backends.reference import ReferenceBackend, ops
from localllm.backends.reference.attention import LayerCache
from localllm.backends.reference.step import ReferenceStep

Doubles = npt.NDArray[np.float64]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape).astype(np.float32)


def close(found: FloatArray, expected: Doubles | FloatArray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_linear(rng: np.random.Generator, rows: int) -> None:
    x, weight = normal(rng, rows, 37), normal(rng, 11, 37)
    close(ops.linear(x, weight), x.astype(np.float64) @ weight.T.astype(np.float64))


@pytest.mark.parametrize(("width", "out"), [(37, 11), (576, 1536), (1536, 576), (64, 3)])
def test_a_row_of_linear_does_not_depend_on_its_place(
    rng: np.random.Generator, width: int, out: int
) -> None:
    x, weight = normal(rng, 40, width), normal(rng, out, width)
    together = ops.linear(x, weight)
    for row in range(len(x)):
        assert np.array_equal(ops.linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("per_head", [False, True])
def test_norm(rng: np.random.Generator, kind: str, per_head: bool) -> None:
    group, heads = 6, 3
    x = normal(rng, 4, group * heads) + 1
    weight = normal(rng, heads if per_head else 1, group)
    bias = normal(rng, group * heads if per_head else group)
    expected = np.empty(x.shape)
    for row in range(len(x)):
        for head in range(heads):
            run = x[row, head * group : (head + 1) * group].astype(np.float64)
            if kind == "layer":
                run = run - run.mean()
            run = run / math.sqrt((run**2).mean() + 1e-3)
            run = run * weight[head if per_head else 0]
            run = run + (bias.reshape(-1, group)[head if per_head else 0])
            expected[row, head * group : (head + 1) * group] = run
    found = ops.norm(
        x, weight, bias, eps=1e-3, kind="rms" if kind == "rms" else "layer", group=group
    )
    close(found, expected)


ACTIVATIONS: dict[ActivationName, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0),
    "relu_squared": lambda x: max(x, 0) ** 2,
}


def test_norm_of_no_rows() -> None:
    """As in a step that only takes in a part of a prompt."""
    nothing = np.zeros((0, 8), np.float32)
    assert ops.norm(nothing, None, None, eps=1e-5, kind="rms", group=4).shape == (0, 8)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: ActivationName) -> None:
    x = np.linspace(-9, 9, 40, dtype=np.float32).reshape(4, 10)
    expected = np.vectorize(ACTIVATIONS[act], otypes=[np.float64])(x.astype(np.float64))
    close(ops.activate(x, act), expected)


def test_softcap() -> None:
    x = np.array([[-100, -3, 0, 1, 80]], np.float32)
    close(ops.softcap(x, 30.0), 30 * np.tanh(x.astype(np.float64) / 30))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 6])
def test_rope_turns_pairs_as_complex_numbers(
    rng: np.random.Generator, interleaved: bool, rotated: int
) -> None:
    head_dim, heads, pairs = 8, 3, rotated // 2
    table = RopeTable(np.array([1.0, 0.3, 0.01, 0.001])[:pairs], 1.5, interleaved)
    positions = np.array([0, 1, 5000, 70000], np.int32)
    x = normal(rng, 4, heads * head_dim)
    expected = x.astype(np.float64).reshape(4, heads, head_dim)
    for row, position in enumerate(positions):
        for pair, frequency in enumerate(table.inv_freq):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
            for head in expected[row]:
                angle = int(position) * frequency
                turned = complex(head[a], head[b]) * 1.5 * complex(math.cos(angle), math.sin(angle))
                head[a], head[b] = turned.real, turned.imag
    close(ops.rope(x, positions, head_dim, table), expected.reshape(4, -1))


def test_position_scale(rng: np.random.Generator) -> None:
    x, positions = normal(rng, 3, 5), np.array([0, 15, 64], np.int32)
    found = ops.position_scale(x, positions, beta=0.5, floor_scale=16, offset=1)
    factors = [1 + 0.5 * math.log(1 + (p + 1) // 16) for p in (0, 15, 64)]
    close(found, x * np.array(factors)[:, None])


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_moe(rng: np.random.Generator, gating: str, normalize: bool) -> None:
    experts, used, hidden, width = 5, 2, 7, 6
    x, logits = normal(rng, 9, width), normal(rng, 9, experts)
    logits[0] = [1, 3, 3, 3, 0]  # of a tie, the lower indices
    gate, up = normal(rng, experts, hidden, width), normal(rng, experts, hidden, width)
    down = normal(rng, experts, width, hidden)
    expected = np.zeros(x.shape)
    for row in range(len(x)):
        z = logits[row].astype(np.float64)
        shares = np.exp(z) / np.exp(z).sum() if gating == "softmax" else 1 / (1 + np.exp(-z))
        best = sorted(range(experts), key=lambda e: (-shares[e], e))[:used]
        total = sum(shares[e] for e in best) if normalize else 1.0
        for e in best:
            g = gate[e].astype(np.float64) @ x[row]
            answer = down[e].astype(np.float64) @ (g / (1 + np.exp(-g)) * (up[e] @ x[row]))
            expected[row] += 2.5 * shares[e] / total * answer
    found = ops.moe(
        x,
        logits,
        gate,
        up,
        down,
        used=used,
        act="silu",
        gating="softmax" if gating == "softmax" else "sigmoid",
        normalize=normalize,
        scale=2.5,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, VOCAB = 4, 2, 6, 5, 32
QUERY, KEY, VALUE = HEADS * KEY_DIM, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM


def attention_step(
    window: int | None, softcap: float | None, sinks: FloatArray | None, n_blocks: int
) -> tuple[ReferenceStep, FloatArray]:
    """Embeds a token as its q, k and v side by side, and attends. And the embedding."""
    rng = np.random.default_rng(1)
    embedding = normal(rng, VOCAB, QUERY + KEY + VALUE)
    program = Program({"qkv": embedding.shape})
    q, k, v = program.split(program.embed("qkv"), QUERY, KEY, VALUE)
    out = program.attention(
        q,
        k,
        v,
        head_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        scale=0.4,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else "sinks",
    )
    program.finish(program.select_rows(out))
    weights = {"qkv": embedding} if sinks is None else {"qkv": embedding, "sinks": sinks}
    (group,) = program.kv_groups
    cache = [LayerCache.empty(layer, n_blocks) for layer in group.layers]
    return ReferenceStep(program, weights, [cache]), embedding


def batch_of(*parts: tuple[list[int], int, list[int]]) -> Batch:
    """Each part is a block table, the position of its first token, and its tokens."""
    positions = [np.arange(at, at + len(ids), dtype=np.int32) for _, at, ids in parts]
    slots = [
        np.array(table, np.int32)[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
        for (table, _, _), p in zip(parts, positions, strict=True)
    ]
    lengths = [len(ids) for _, _, ids in parts]
    total = sum(lengths)
    return Batch(
        ids=np.concatenate([ids for _, _, ids in parts]).astype(np.int32),
        positions=np.concatenate(positions),
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array([at + len(ids) for _, at, ids in parts], np.int32),
        slots=np.concatenate(slots)[None],
        block_tables=np.array([[table for table, _, _ in parts]], np.int32),
        logit_rows=np.arange(total, dtype=np.int32),
        sampling=SamplingArrays.greedy(total),
    )


def naive_attention(
    qkv: FloatArray, window: int | None, softcap: float | None, sinks: FloatArray | None
) -> Doubles:
    """All positions of one sequence at once, over masked squares."""
    n = len(qkv)
    q, k, v = np.split(qkv.astype(np.float64), [QUERY, QUERY + KEY], axis=1)
    keys = np.repeat(k.reshape(n, KV_HEADS, KEY_DIM), HEADS // KV_HEADS, axis=1)
    values = np.repeat(v.reshape(n, KV_HEADS, VALUE_DIM), HEADS // KV_HEADS, axis=1)
    scores = np.einsum("ihd,jhd->hij", q.reshape(n, HEADS, KEY_DIM), keys) * 0.4
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(n)[:, None] - np.arange(n)
    visible = (distance >= 0) & (distance < (window or n))
    weights = np.exp(scores) * visible
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64))[:, None, None]
    attended = np.einsum("hij,jhd->ihd", weights / total, values)
    return np.asarray(attended.reshape(n, -1), np.float64)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention(
    rng: np.random.Generator, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    sinks = normal(rng, HEADS) if with_sinks else None
    step, embedding = attention_step(window, softcap, sinks, n_blocks=9)
    first = rng.integers(0, VOCAB, 50).tolist()
    second = rng.integers(0, VOCAB, 33).tolist()
    tables = [7, 1, 4, 2], [3, 8, 5, 0]
    found: list[list[FloatArray]] = [[], []]
    at = [0, 0]
    for sizes in [(20, 1), (1, 12), (29, 20)]:
        parts = [
            (table, start, ids[start : start + size])
            for table, start, ids, size in zip(tables, at, (first, second), sizes, strict=True)
        ]
        step.submit(batch_of(*parts))
        for news, rows in zip(found, np.split(step.logits(), [sizes[0]]), strict=True):
            news.append(rows.copy())
        at = [start + size for start, size in zip(at, sizes, strict=True)]
    for ids, steps in zip((first, second), found, strict=True):
        close(np.concatenate(steps), naive_attention(embedding[ids], window, softcap, sinks))


def test_blocks_that_a_window_left_behind_are_not_read(rng: np.random.Generator) -> None:
    step, embedding = attention_step(20, None, None, n_blocks=5)
    ids = rng.integers(0, VOCAB, 60).tolist()
    step.submit(batch_of(([1, 2, 3, 4], 0, ids[:52])))
    last = batch_of(([1, 2, 3, 4], 52, ids[52:]))
    last.block_tables[0, 0, :2] = -1  # positions 0 to 31; the window of 52 begins at 33
    for pages in (step._caches[0][0].keys, step._caches[0][0].values):
        pages[[0, 1, 2]] = np.nan
    step.submit(last)
    close(step.logits(), naive_attention(embedding[ids], 20, None, None)[52:])


def test_trace_shows_every_op_and_changes_nothing(rng: np.random.Generator) -> None:
    step, embedding = attention_step(None, None, None, n_blocks=3)
    ids = rng.integers(0, VOCAB, 20).tolist()
    batch = batch_of(([1, 2], 0, ids))
    batch.logit_rows = np.array([4, 19], np.int32)
    batch.sampling = SamplingArrays.greedy(2)
    embedded, attended, selected = step.trace(batch)
    assert np.array_equal(embedded, embedding[ids])
    assert np.array_equal(selected, attended[[4, 19]])
    step.submit(batch)
    assert np.array_equal(step.logits(), selected)
    assert step.collect().tolist() == selected.argmax(axis=1).tolist()


def test_nothing_to_collect_before_a_batch() -> None:
    step, _ = attention_step(None, None, None, n_blocks=1)
    with pytest.raises(RuntimeError):
        step.collect()
    with pytest.raises(RuntimeError):
        step.logits()


def test_sizes() -> None:
    backend = ReferenceBackend()
    group = KVGroup(None, [KVLayer(2, 8, 4), KVLayer(1, 8, 8)])
    assert backend.kv_block_bytes(group) == BLOCK_TOKENS * (2 * 12 + 16) * 4
    ((first, second),) = backend.alloc_kv([group], [3])
    assert first.keys.shape == (3, BLOCK_TOKENS, 2, 8)
    assert first.values.shape == (3, BLOCK_TOKENS, 2, 4)
    assert second.values.nbytes + second.keys.nbytes == 3 * BLOCK_TOKENS * 16 * 4
    program = Program({"embedding": (10, 4)})
    program.finish(
        program.linear(program.select_rows(program.embed("embedding")), "embedding", shard="vocab")
    )
    limits = StepLimits(tokens=100, seqs=2, logit_rows=3, context=50)
    assert backend.workspace_bytes(program, limits) == (100 * 4 + 3 * 4 + 3 * 10) * 4
