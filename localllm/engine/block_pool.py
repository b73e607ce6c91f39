"""The blocks of one KV group: who holds them, what they contain, which one is taken next."""

from __future__ import annotations

from collections import OrderedDict

BlockKey = bytes  # names a block's content together with everything before it


class BlockPool:
    """Reference-counted blocks 0..n_blocks-1, of which full ones can be found by their content.

    A block that nobody holds keeps its content and can be found until it is taken for something
    else, least recently released first. Blocks whose memory was never touched are taken last, save
    that up to `keep_cached` free blocks with known content are left alone for as long as untouched
    ones remain: the cache may grow to that size, and the pool beyond it only with live sequences.
    """

    def __init__(self, n_blocks: int, keep_cached: int) -> None:
        self.n_blocks = n_blocks
        self._keep_cached = keep_cached
        self._holders = [0] * n_blocks
        self._keys: list[BlockKey | None] = [None] * n_blocks
        self._by_key: dict[BlockKey, int] = {}
        self._blank: list[int] = []  # free, touched, content of no use
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, in order of release
        self.evictions = 0  # blocks with known content that were taken for something else
        self._touched = 0  # blocks from here on are free and were never used

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._cached) + self.n_blocks - self._touched

    @property
    def touched(self) -> int:
        return self._touched

    def find(self, key: BlockKey) -> int | None:
        return self._by_key.get(key)

    def is_free(self, block: int) -> bool:
        return self._holders[block] == 0

    def allocate(self) -> int:
        """A block of unspecified content, held once. The caller has checked `free`."""
        block = self._take()
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder for a block that `find` gave."""
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._keys[block] is None:
            self._blank.append(block)
        else:
            self._cached[block] = None

    def register(self, block: int, key: BlockKey) -> None:
        """Makes a held block findable, unless another one with the same content is already."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        untouched = self._touched < self.n_blocks
        if self._cached and not (untouched and len(self._cached) <= self._keep_cached):
            block, _ = self._cached.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            del self._by_key[key]
            self._keys[block] = None
            self.evictions += 1
            return block
        if not untouched:
            raise LookupError("the block pool is exhausted")
        self._touched += 1
        return self._touched - 1

    def check_integrity(self, holders: list[int]) -> None:
        """Raises AssertionError unless the books balance; `holders` are the true counts."""
        assert self._holders == holders, "reference counts differ from the block tables"
        free = [*self._blank, *self._cached, *range(self._touched, self.n_blocks)]
        assert len(set(free)) == len(free) == self.free, "a block is free twice"
        assert set(free) == {b for b, n in enumerate(holders) if n == 0}, "a block is lost"
        assert all(self._keys[b] is None for b in self._blank)
        assert all(self._keys[b] is not None for b in self._cached)
        assert all(self._keys[b] is None for b in range(self._touched, self.n_blocks))
        named = {key: b for b, key in enumerate(self._keys) if key is not None}
        assert named == self._by_key, "content keys and blocks do not match"
        assert all(self._keys[b] is not None for b, n in enumerate(holders) if n > 1), (
            "a block is shared whose content is not known"
        )
