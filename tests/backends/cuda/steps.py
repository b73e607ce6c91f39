"""Random steps over a paged cache, and what the reference backend answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, SamplingArrays
from localllm.backends.cuda.kernels.attention import AttentionShape, attend, n_splits, query_tiles
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import store
from localllm.backends.program import Attention, FloatArray, KVLayer, Value
from localllm.backends.reference.attention import LayerCache, attention


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class PagedSequences:
    """Sequences of known lengths with random keys and values, in blocks that lie scattered."""

    def __init__(
        self, heads: Heads, lengths: Sequence[int], window: int | None, rng: np.random.Generator
    ) -> None:
        self.heads, self.lengths, self.window, self.rng = heads, lengths, window, rng
        widest = max(-(-n // BLOCK_TOKENS) for n in lengths)
        free = list(rng.permutation(len(lengths) * widest + 2))
        self.n_blocks = len(free)
        self.table = np.full((len(lengths), widest), -1, np.int32)
        for s, length in enumerate(lengths):
            for b in range(-(-length // BLOCK_TOKENS)):
                self.table[s, b] = free.pop()
        self.keys = [self._normal(n, heads.kv_heads * heads.key_dim) for n in lengths]
        self.values = [self._normal(n, heads.kv_heads * heads.value_dim) for n in lengths]
        self.queries = [self._normal(n, heads.heads * heads.key_dim) for n in lengths]

    def _normal(self, *shape: int) -> FloatArray:
        """Numbers that float16 and bfloat16 hold exactly, so that only sums can differ."""
        numbers = torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))
        exact: FloatArray = numbers.to(torch.float8_e4m3fn).float().numpy()
        return exact

    def slots(self, s: int, positions: Int32Array) -> Int32Array:
        blocks = self.table[s, positions // BLOCK_TOKENS]
        slots: Int32Array = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return slots

    def fill(self, cache: PagedCache) -> None:
        for s, length in enumerate(self.lengths):
            slots = torch.from_numpy(self.slots(s, np.arange(length, dtype=np.int32)))
            k, v = torch.from_numpy(self.keys[s]), torch.from_numpy(self.values[s])
            if cache.quantized:
                store(k, v, cache, slots)
                continue
            for pages, rows in ((cache.keys, k), (cache.values, v)):  # the kernel is slow here
                at = (slots // BLOCK_TOKENS, slots % BLOCK_TOKENS)
                pages[at] = rows.reshape(length, *pages.shape[2:]).to(pages.dtype)

    def batch(self, new: Sequence[int]) -> Batch:
        """The last new[s] positions of each sequence as one step."""
        positions = [np.arange(n - k, n) for n, k in zip(self.lengths, new, strict=True)]
        table = self.table.copy()
        if self.window is not None:
            for s, of_sequence in enumerate(positions):
                if len(of_sequence):
                    left = max(0, int(of_sequence[0]) - self.window + 1) // BLOCK_TOKENS
                    table[s, :left] = -1
        slots = [self.slots(s, p.astype(np.int32)) for s, p in enumerate(positions)]
        return Batch(
            ids=np.zeros(sum(new), np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            seq_lens=np.array(self.lengths, np.int32),
            slots=np.concatenate(slots)[None],
            block_tables=table[None],
            logit_rows=np.zeros(0, np.int32),
            sampling=SamplingArrays.greedy(0),
        )

    def rows(self, arrays: Sequence[FloatArray], new: Sequence[int]) -> FloatArray:
        return np.concatenate([a[len(a) - n :] for a, n in zip(arrays, new, strict=True)])

    def expected(
        self, new: Sequence[int], scale: float, softcap: float | None, sinks: FloatArray | None
    ) -> FloatArray:
        """By the reference backend, all but the step's own tokens stored beforehand."""
        h = self.heads
        cache = LayerCache.empty(KVLayer(h.kv_heads, h.key_dim, h.value_dim), self.n_blocks)
        for s, length in enumerate(self.lengths):
            slots = self.slots(s, np.arange(length, dtype=np.int32))
            cache.store(self.keys[s], self.values[s], slots)
        op = Attention(
            _value(h.heads * h.value_dim), _value(h.heads * h.key_dim),
            _value(h.kv_heads * h.key_dim), _value(h.kv_heads * h.value_dim),
            0, 0, h.key_dim, h.value_dim, scale, self.window, softcap,
        )  # fmt: skip
        step = [self.rows(a, new) for a in (self.queries, self.keys, self.values)]
        return attention(op, step[0], step[1], step[2], sinks, cache, self.batch(new))

    def attend(
        self,
        cache: PagedCache,
        new: Sequence[int],
        *,
        scale: float,
        softcap: float | None = None,
        sinks: FloatArray | None = None,
        split: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        h, batch = self.heads, self.batch(new)
        q = torch.from_numpy(self.rows(self.queries, new)).to(dtype)
        out = torch.full((len(q), h.heads * h.value_dim), torch.nan)
        attend(
            AttentionShape(h.heads, scale, self.window, softcap),
            q,
            cache,
            out,
            block_table=torch.from_numpy(batch.block_tables[0]),
            positions=torch.from_numpy(batch.positions),
            tiles=torch.from_numpy(query_tiles(batch.query_start, h.heads, h.kv_heads)),
            sinks=None if sinks is None else torch.from_numpy(sinks),
            side_by_side=n_splits(max(self.lengths)) if split else 0,
        )
        return out

    def cache(self, dtype: torch.dtype = torch.float32) -> PagedCache:
        """Filled with everything up to the lengths."""
        h = self.heads
        cache = PagedCache.empty(self.n_blocks, h.kv_heads, h.key_dim, h.value_dim, dtype)
        self.fill(cache)
        return cache


def _value(width: int) -> Value:
    return Value(0, 0, width, width, "T")
