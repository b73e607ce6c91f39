"""Attention over the paged cache, and the store in it, against the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gpu_checks.check import Check, Json, holds, identical
from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, SamplingArrays
from localllm.backends.cuda.kernels.attention import AttentionShape, attend, n_splits, query_tiles
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import angles, rope_and_store, store
from localllm.backends.program import Attention, FloatArray, KVLayer, RopeTable, Value
from localllm.backends.reference import ops
from localllm.backends.reference.attention import LayerCache, attention

# Sequences' lengths and how many of their positions are new: one token, one block, a token more, a
# prompt of several splits, decoding.
LENGTHS, NEW = (1, 16, 17, 700, 530), (1, 16, 3, 90, 1)
REHEARSED_LENGTHS, REHEARSED_NEW = (1, 17, 40), (1, 3, 1)

# Of the largest output: weights of the softmax are rounded to the type of the products.
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.int8: 2e-2}


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Variant:
    heads: Heads = Heads(8, 2, 128)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    quantized: bool = False  # q8_0 keys and values


class Sequences:
    """Random keys, values and queries, in blocks that lie scattered."""

    def __init__(self, variant: Variant, lengths: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.variant, self.lengths, self.new = variant, lengths, new
        self.rng = np.random.default_rng(7)
        widest = -(-max(lengths) // BLOCK_TOKENS)
        blocks = self.rng.permutation(len(lengths) * widest)
        self.n_blocks = len(blocks)
        self.table = blocks.reshape(len(lengths), widest).astype(np.int32)
        h = variant.heads
        self.keys = [self._normal(n, h.kv_heads * h.dim) for n in lengths]
        self.values = [self._normal(n, h.kv_heads * h.dim) for n in lengths]
        self.queries = self._normal(sum(new), h.heads * h.dim)
        self.sinks = self._normal(1, h.heads)[0] if variant.sinks else None

    def _normal(self, *shape: int) -> FloatArray:
        """Numbers that 16 bits hold exactly, so that inputs are the same on both sides."""
        numbers = torch.from_numpy(self.rng.standard_normal(shape, np.float32))
        exact: FloatArray = numbers.to(torch.float8_e4m3fn).float().numpy()
        return exact

    def slots(self, s: int, positions: Int32Array) -> Int32Array:
        blocks = self.table[s, positions // BLOCK_TOKENS]
        slots: Int32Array = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return slots

    def batch(self) -> Batch:
        positions = [
            np.arange(n - k, n, dtype=np.int32) for n, k in zip(self.lengths, self.new, strict=True)
        ]
        slots = [self.slots(s, p) for s, p in enumerate(positions)]
        return Batch(
            ids=np.zeros(sum(self.new), np.int32),
            positions=np.concatenate(positions),
            query_start=np.cumsum([0, *self.new]).astype(np.int32),
            seq_lens=np.array(self.lengths, np.int32),
            slots=np.concatenate(slots)[None],
            block_tables=self.table[None],
            logit_rows=np.zeros(0, np.int32),
            sampling=SamplingArrays.greedy(0),
        )

    def cache(self, dtype: torch.dtype, device: str) -> PagedCache:
        """Everything stored, the new positions too."""
        h = self.variant.heads
        kept = torch.int8 if self.variant.quantized else dtype
        cache = PagedCache.empty(self.n_blocks, h.kv_heads, h.dim, h.dim, kept, device)
        for s, length in enumerate(self.lengths):
            rows = [torch.from_numpy(a[s]).to(device, dtype) for a in (self.keys, self.values)]
            slots = self.slots(s, np.arange(length, dtype=np.int32))
            store(rows[0], rows[1], cache, torch.from_numpy(slots).to(device))
        return cache

    def expected(self) -> FloatArray:
        h, v = self.variant.heads, self.variant
        cache = LayerCache.empty(KVLayer(h.kv_heads, h.dim, h.dim), self.n_blocks)
        for s, length in enumerate(self.lengths):
            slots = self.slots(s, np.arange(length, dtype=np.int32))
            cache.store(self.keys[s], self.values[s], slots)
        wide, narrow = _value(h.heads * h.dim), _value(h.kv_heads * h.dim)
        op = Attention(
            wide, wide, narrow, narrow, 0, 0, h.dim, h.dim, h.dim**-0.5, v.window, v.softcap
        )
        k, v_ = (
            np.concatenate([a[len(a) - n :] for a, n in zip(arrays, self.new, strict=True)])
            for arrays in (self.keys, self.values)
        )
        return attention(op, self.queries, k, v_, self.sinks, cache, self.batch())

    def attend(self, cache: PagedCache, dtype: torch.dtype, device: str, split: bool) -> FloatArray:
        h, v, batch = self.variant.heads, self.variant, self.batch()
        out = torch.full(self.queries.shape, torch.nan, device=device)

        def sent(array: Int32Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        attend(
            AttentionShape(h.heads, h.dim**-0.5, v.window, v.softcap),
            torch.from_numpy(self.queries).to(device, dtype),
            cache,
            out,
            block_table=sent(batch.block_tables[0]),
            positions=sent(batch.positions),
            tiles=sent(query_tiles(batch.query_start, h.heads, h.kv_heads)),
            sinks=None if self.sinks is None else torch.from_numpy(self.sinks).to(device),
            side_by_side=n_splits(max(self.lengths)) if split else 0,
        )
        result: FloatArray = out.cpu().numpy()
        return result


def _value(width: int) -> Value:
    return Value(0, 0, width, width, "T")


def attention_case(check: Check, variant: Variant) -> Json:
    """Both ways to walk over the splits, which have to give the same bits."""
    dtype = getattr(torch, check.dtype)
    shape = (REHEARSED_LENGTHS, REHEARSED_NEW) if check.rehearsal else (LENGTHS, NEW)
    sequences = Sequences(variant, *shape)
    cache = sequences.cache(dtype, check.device)
    in_order, split = (
        sequences.attend(cache, dtype, check.device, split) for split in (False, True)
    )
    expected = sequences.expected()
    difference = float(np.abs(in_order - expected).max() / np.abs(expected).max())
    limit = ERRORS[torch.int8 if variant.quantized else dtype]
    return {
        "error": holds(difference, limit),
        "splits side by side or one after another": identical(np.array_equal(in_order, split)),
    }


def rotation(check: Check) -> Json:
    """Queries rotated, keys rotated into the cache, values beside them."""
    rng = np.random.default_rng(3)
    dim, positions = 128, np.array([0, 3, 900], np.int32)
    slots = np.array([35, 0, 79], np.int32)
    table = RopeTable(10000.0 ** (-np.arange(dim // 2) / (dim // 2)), 1.25, interleaved=True)
    q, k, v = (rng.standard_normal((3, n * dim), np.float32) for n in (8, 2, 2))
    cache = PagedCache.empty(5, 2, dim, dim, torch.float32, check.device)
    out = torch.empty(3, 8 * dim, device=check.device)
    sent = [torch.from_numpy(a).to(check.device) for a in (q, k, v, positions, slots)]
    turns = angles(table, 1000, check.device)
    rope_and_store(sent[0], sent[1], sent[2], out, cache, sent[3], sent[4], turns)
    found: dict[str, Json] = {}
    for name, actual, expected in (
        ("queries", out, ops.rope(q, positions, dim, table)),
        ("keys", cache.keys.reshape(-1, 2 * dim)[sent[4]], ops.rope(k, positions, dim, table)),
        ("values", cache.values.reshape(-1, 2 * dim)[sent[4]], v),
    ):
        found[name] = holds(float(np.abs(actual.cpu().numpy() - expected).max()), 1e-5)
    return found


CASES: dict[str, Callable[[Check], Json]] = {
    "attention": partial(attention_case, variant=Variant()),
    "attention, window of 5, soft cap, sinks": partial(
        attention_case, variant=Variant(Heads(9, 3, 64), 5, 20.0, sinks=True)
    ),
    "attention, q8_0": partial(attention_case, variant=Variant(window=300, quantized=True)),
    "attention, heads of 256": partial(attention_case, variant=Variant(Heads(4, 1, 256))),
    "rotation and store": rotation,
}
