"""Sequences in a paged cache, attended to by the kernels and by plain formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernels import kv
from localllm.backends.cpu.kernels.attention import (
    AttendArgs,
    attend,
    parts_bytes,
    scratch_bytes,
    tile_kernels,
)
from localllm.backends.program import KVGroup, KVLayer
from tests.backends.cpu.kernels.harness import Header, address, aligned, run

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int = 0
    softcap: float = 0.0
    with_sinks: bool = False

    @property
    def scale(self) -> float:
        return float(self.key_dim**-0.5)


class Paged:
    """Random sequences of the given lengths and a cache of one group with three layers.

    `seed` gives keys, values and queries of all positions; the place of blocks and the garbage
    that the cache holds at first come from `layout`.
    """

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0, layout: int = 0) -> None:
        self.shape = shape
        self.lengths = lengths
        rng = np.random.default_rng(seed)
        self.k = [self._random(rng, n, shape.kv_heads * shape.key_dim) for n in lengths]
        self.v = [self._random(rng, n, shape.kv_heads * shape.value_dim) for n in lengths]
        self.q = [self._random(rng, n, shape.heads * shape.key_dim) * 2 for n in lengths]
        self.sinks = self._random(rng, 1, shape.heads)[0] if shape.with_sinks else None
        layer = KVLayer(shape.kv_heads, shape.key_dim, shape.value_dim)
        self.group = KVGroup(shape.window or None, [KVLayer(1, 24, 8), layer, KVLayer(3, 8, 40)])
        self._place(np.random.default_rng(layout))

    @staticmethod
    def _random(rng: np.random.Generator, rows: int, width: int) -> Floats:
        return rng.standard_normal((rows, width)).astype(np.float32)

    def _place(self, rng: np.random.Generator) -> None:
        needed = [-(-n // BLOCK_TOKENS) for n in self.lengths]
        n_blocks = sum(needed) + 3
        blocks = rng.permutation(n_blocks).astype(np.int32)
        self.tables = np.full((2, len(self.lengths), max(needed) + 1), -1, np.int32)
        at = 0
        for s, n in enumerate(needed):
            self.tables[1, s, :n] = blocks[at : at + n]
            at += n
        self.block_bytes = kv.group_block_bytes(self.group)
        self.memory = aligned(n_blocks * self.block_bytes)
        self.memory[:] = rng.integers(0, 256, len(self.memory), np.uint8)  # NaN and inf among it
        self.cache = address(self.memory) + kv.layer_offset(self.group, 1)
        self.head_bytes = kv.head_bytes(self.group.layers[1])

    def store(self, ranges: list[tuple[int, int, int]], threads: int = 1) -> None:
        """Stores positions first..end of sequences given as (sequence, first, end)."""
        places = [(s, p) for s, first, end in ranges for p in range(first, end)]
        k = np.stack([self.k[s][p] for s, p in places])
        v = np.stack([self.v[s][p] for s, p in places])
        slots = [
            self.tables[1, s, p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
            for s, p in places
        ]
        header = Header(tokens=len(places), slots=np.array([[-1] * len(places), slots], np.int32))
        words = kv.StoreArgs(
            k=address(k),
            k_stride=k.shape[1],
            v=address(v),
            v_stride=v.shape[1],
            cache=self.cache,
            block_bytes=self.block_bytes,
            head_bytes=self.head_bytes,
            group=1,
            kv_heads=self.shape.kv_heads,
            key_dim=self.shape.key_dim,
            value_dim=self.shape.value_dim,
        )
        run(kv.kv_store, words, header, threads)

    def attend(
        self, ranges: list[tuple[int, int, int]], threads: int = 1, parts: int | None = None
    ) -> list[Floats]:
        """Stores and attends positions first..end of each (sequence, first, end): [n, width].

        `parts` overrides the size of the memory for parts that threads share.
        """
        self.store(ranges, threads)
        shape = self.shape
        q = np.concatenate([self.q[s][first:end] for s, first, end in ranges])
        out = np.full((len(q), shape.heads * shape.value_dim + 8), np.nan, np.float32)
        tables = np.ascontiguousarray(self.tables[:, [s for s, _, _ in ranges]])
        for row, (_, first, _) in zip(tables[1], ranges, strict=True):
            if shape.window:  # blocks that the window has left are gone
                row[: max(0, first - shape.window + 1) // BLOCK_TOKENS] = -1
        counts = [end - first for _, first, end in ranges]
        header = Header(
            tokens=len(q),
            query_start=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens=np.array([end for _, _, end in ranges], np.int32),
            block_tables=tables,
        )
        dims = (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim)
        scratch = aligned(scratch_bytes(*dims) * threads)
        if parts is None:
            parts = parts_bytes(
                threads, max(self.lengths), shape.heads, shape.kv_heads, shape.value_dim
            )
        shared = aligned(parts)
        words = AttendArgs(
            q=address(q),
            q_stride=q.shape[1],
            out=address(out),
            out_stride=out.shape[1],
            cache=self.cache,
            block_bytes=self.block_bytes,
            head_bytes=self.head_bytes,
            group=1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            sinks=address(self.sinks),
            scratch=address(scratch),
            scratch_bytes=len(scratch) // threads,
            parts=address(shared),
            parts_bytes=parts,
            **{name: kernel.address for name, kernel in tile_kernels().items()},
        )
        for _ in range(2):  # the second call finds the counters as the first left them
            run(attend, words, header, threads)
        assert np.isnan(out[:, -8:]).all()  # nothing is written past the output
        return np.split(out[:, :-8], np.cumsum(counts)[:-1])

    def formula(self, sequence: int, position: int) -> Floats:
        """What `attend` should give for one position, in float64 from float16 keys and values."""
        shape = self.shape
        first = max(0, position - shape.window + 1) if shape.window else 0
        seen = slice(first, position + 1)
        k = self.k[sequence].astype(np.float16).astype(np.float64)[seen]
        v = self.v[sequence].astype(np.float16).astype(np.float64)[seen]
        q = self.q[sequence][position].reshape(shape.heads, shape.key_dim)
        outputs = []
        for head in range(shape.heads):
            kv_head = head * shape.kv_heads // shape.heads
            keys = k.reshape(len(k), shape.kv_heads, -1)[:, kv_head]
            scores = keys @ q[head].astype(np.float64) * shape.scale
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            sink = -np.inf if self.sinks is None else float(self.sinks[head])
            largest = max(scores.max(), sink)
            weights = np.exp(scores - largest)
            weights /= weights.sum() + np.exp(sink - largest)
            outputs.append(weights @ v.reshape(len(v), shape.kv_heads, -1)[:, kv_head])
        return np.concatenate(outputs).astype(np.float32)
