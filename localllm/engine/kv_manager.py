"""Block tables of all sequences over all KV groups, and the prefix cache behind them.

Pure bookkeeping: nothing here touches the cache's memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from localllm.engine.block_pool import BlockKey, BlockPool

NO_BLOCK = -1  # table entry of a block that the window has left behind


@dataclass(slots=True)
class SequenceBlocks:
    """What one sequence holds: per group a table of int32 block numbers, block i at entry i."""

    tables: tuple[array[int], ...]
    live_from: list[int]  # per group, entries before this are NO_BLOCK
    root: BlockKey
    keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, as far as needed yet
    registered: int = 0  # full blocks offered to the prefix cache


class Growth(NamedTuple):
    """A running sequence will reach `tokens`, at most `chunk` of them in one step."""

    blocks: SequenceBlocks
    tokens: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached blocks for the first `tokens` tokens; per group those from entry `first` on.

    `missing` is the key of the next full block that might have been cached, if there is one.
    """

    tokens: int
    first: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    missing: BlockKey | None


class KVManager:
    """Keeps one pool per group; `windows` gives each group's sliding window or None.

    A sequence holds blocks for every token that its window can still see. Blocks are offered to
    the prefix cache when `commit` says that their content has been computed.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        n_blocks: Sequence[int],
        block_tokens: int,
        *,
        prefix_cache: bool = True,
        keep_cached: Sequence[int] | None = None,
    ) -> None:
        self.windows = tuple(windows)
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        keep = keep_cached if keep_cached is not None else n_blocks
        self.failures = 0  # times that `grow` found no room
        self.pools = tuple(BlockPool(n, k) for n, k in zip(n_blocks, keep, strict=True))

    def new_sequence(self, cache_salt: str) -> SequenceBlocks:
        groups = len(self.pools)
        root = blake2b(cache_salt.encode(), digest_size=16).digest()
        return SequenceBlocks(tuple(array("i") for _ in range(groups)), [0] * groups, root)

    def find_prefix(self, blocks: SequenceBlocks, tokens: array[int], limit: int) -> Prefix:
        """The longest cached run of whole blocks, at most `limit` tokens. Changes nothing held."""
        most = n = limit // self.block_tokens if self.prefix_cache else 0
        keys = self._keys(blocks, tokens, n)
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                n = next((i for i in range(n) if pool.find(keys[i]) is None), n)
        runs = [
            (window, _runs(pool, keys[:n]))
            for pool, window in zip(self.pools, self.windows, strict=True)
            if window is not None
        ]
        while n and any(run[n - 1] < n - self._first_seen(n, w) for w, run in runs):
            n -= 1
        first = tuple(self._first_seen(n, window) for window in self.windows)
        found = tuple(
            tuple(block for key in keys[f:n] if (block := pool.find(key)) is not None)
            for pool, f in zip(self.pools, first, strict=True)
        )
        return Prefix(n * self.block_tokens, first, found, keys[n] if n < most else None)

    def can_admit(
        self, prefix: Prefix, n_tokens: int, chunk: int, running: Iterable[Growth]
    ) -> bool:
        """Whether a new sequence of n_tokens, computed in chunks, fits beside the running ones."""
        running = list(running)
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            cached = prefix.blocks[g]
            need = most_blocks(window, n_tokens, chunk, self.block_tokens) - len(cached)
            need += sum(1 for b in cached if pool.is_free(b))
            for blocks, tokens, step in running:
                most = most_blocks(window, tokens, step, self.block_tokens)
                need += max(0, most - (len(blocks.tables[g]) - blocks.live_from[g]))
            if need > pool.free:
                return False
        return True

    def admit(self, blocks: SequenceBlocks, prefix: Prefix) -> None:
        """Gives an empty sequence the cached prefix."""
        for g, pool in enumerate(self.pools):
            for block in prefix.blocks[g]:
                pool.hold(block)
            blocks.tables[g].extend([NO_BLOCK] * prefix.first[g])
            blocks.tables[g].extend(prefix.blocks[g])
            blocks.live_from[g] = prefix.first[g]
        blocks.registered = prefix.tokens // self.block_tokens

    def grow(self, blocks: SequenceBlocks, n_tokens: int) -> bool:
        """Blocks for the first n_tokens, in every group; False, and no change, if one is full."""
        more = self._lacking(blocks, n_tokens)
        if more <= 0:
            return True
        if any(pool.free < more for pool in self.pools):
            self.failures += 1
            return False
        self._extend(blocks, more)
        return True

    def grow_all(self, growths: Sequence[tuple[SequenceBlocks, int]]) -> bool:
        """Like `grow`, of all that are given or of none; finding no room is no failure."""
        lacking = [max(0, self._lacking(blocks, n_tokens)) for blocks, n_tokens in growths]
        if any(pool.free < sum(lacking) for pool in self.pools):
            return False
        for (blocks, _), more in zip(growths, lacking, strict=True):
            self._extend(blocks, more)
        return True

    def commit(self, blocks: SequenceBlocks, tokens: array[int], computed: int) -> None:
        """The first `computed` tokens are in the cache: offers full blocks, drops unseen ones."""
        full = computed // self.block_tokens
        if self.prefix_cache and full > blocks.registered:
            keys = self._keys(blocks, tokens, full)
            for table, pool in zip(blocks.tables, self.pools, strict=True):
                for i in range(blocks.registered, full):
                    pool.register(table[i], keys[i])
            blocks.registered = full
        for g, window in enumerate(self.windows):
            if window is not None:
                self._leave_behind(blocks, g, max(0, computed - window + 1) // self.block_tokens)

    def pending_keys(
        self, blocks: SequenceBlocks, tokens: array[int], end: int
    ) -> Sequence[BlockKey]:
        """Keys that `commit` will offer once tokens up to `end` are computed."""
        if not self.prefix_cache:
            return ()
        full = end // self.block_tokens
        return self._keys(blocks, tokens, full)[blocks.registered : full]

    def release(self, blocks: SequenceBlocks) -> None:
        """Lets go of everything; the end of a prefix is evicted before its beginning."""
        for g, pool in enumerate(self.pools):
            table = blocks.tables[g]
            for i in range(len(table) - 1, blocks.live_from[g] - 1, -1):
                pool.release(table[i])
            del table[:]
            blocks.live_from[g] = 0
        blocks.registered = 0

    def usage(self) -> float:
        """Share of blocks that sequences hold, in the fullest group."""
        return max((1 - pool.free / pool.n_blocks for pool in self.pools), default=0.0)

    @property
    def evictions(self) -> int:
        """Cached blocks that were taken for something else, in all groups."""
        return sum(pool.evictions for pool in self.pools)

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Raises AssertionError unless pools and the tables of all `live` sequences agree."""
        live = list(live)
        for g, pool in enumerate(self.pools):
            holders = [0] * pool.n_blocks
            content: dict[int, BlockKey] = {}
            for blocks in live:
                table, start = blocks.tables[g], blocks.live_from[g]
                assert all(b == NO_BLOCK for b in table[:start])
                for i in range(start, len(table)):
                    holders[table[i]] += 1
                    if i < blocks.registered:
                        known = content.setdefault(table[i], blocks.keys[i])
                        assert known == blocks.keys[i], "two contents share one block"
            pool.check_integrity(holders)

    def _lacking(self, blocks: SequenceBlocks, n_tokens: int) -> int:
        """How many blocks more n_tokens want than there are: the same in all groups."""
        return -(-n_tokens // self.block_tokens) - len(blocks.tables[0])

    def _extend(self, blocks: SequenceBlocks, more: int) -> None:
        for table, pool in zip(blocks.tables, self.pools, strict=True):
            table.extend([pool.allocate() for _ in range(more)])

    def _first_seen(self, n: int, window: int | None) -> int:
        """First block that the token after n full blocks can see."""
        size = self.block_tokens
        return 0 if window is None else max(0, n * size - window + 1) // size

    def _leave_behind(self, blocks: SequenceBlocks, group: int, first: int) -> None:
        table, pool = blocks.tables[group], self.pools[group]
        for i in range(blocks.live_from[group], first):
            pool.release(table[i])
            table[i] = NO_BLOCK
        blocks.live_from[group] = max(first, blocks.live_from[group])

    def _keys(self, blocks: SequenceBlocks, tokens: array[int], n: int) -> list[BlockKey]:
        keys, size = blocks.keys, self.block_tokens
        while len(keys) < n:
            i = len(keys)
            parent = keys[-1] if keys else blocks.root
            content = tokens[i * size : (i + 1) * size].tobytes()
            keys.append(blake2b(parent + content, digest_size=16).digest())
        return keys


def most_blocks(window: int | None, n_tokens: int, chunk: int, block_tokens: int) -> int:
    """The most blocks of one group that a sequence holds while growing to n_tokens in chunks."""
    whole = -(-n_tokens // block_tokens)
    if window is None:
        return whole
    seen = window - 1 + min(chunk, n_tokens)  # consecutive tokens, starting anywhere in a block
    return min(whole, (seen + block_tokens - 2) // block_tokens + 1)


def _runs(pool: BlockPool, keys: Sequence[BlockKey]) -> list[int]:
    """For each block the length of the run of cached blocks that ends with it."""
    runs, run = [], 0
    for key in keys:
        run = 0 if pool.find(key) is None else run + 1
        runs.append(run)
    return runs
