"""The block pool against a plain model of what it promises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localllm.engine.block_pool import BlockPool


def key(n: int) -> bytes:
    return n.to_bytes(4, "big")


def cached_blocks(pool: BlockPool, n: int) -> list[int]:
    """Takes n blocks, registers block i under key(i), and lets go of them in order."""
    blocks = [pool.allocate() for _ in range(n)]
    for i, block in enumerate(blocks):
        pool.register(block, key(i))
    for block in blocks:
        pool.release(block)
    return blocks


def test_a_released_block_is_reused_before_an_untouched_one() -> None:
    pool = BlockPool(8, keep_cached=8)
    first = pool.allocate()
    pool.release(first)
    assert pool.allocate() == first
    assert pool.touched == 1


def test_cached_blocks_are_found_until_evicted_least_recently_released_first() -> None:
    pool = BlockPool(3, keep_cached=3)
    blocks = cached_blocks(pool, 3)
    pool.hold(blocks[0])  # a hit makes it the most recent
    pool.release(blocks[0])
    assert pool.allocate() == blocks[1]
    assert [pool.find(key(i)) for i in range(3)] == [blocks[0], None, blocks[2]]
    assert pool.allocate() == blocks[2]
    assert pool.evictions == 2


def test_the_cache_grows_into_untouched_memory_up_to_its_share() -> None:
    pool = BlockPool(8, keep_cached=2)
    cached_blocks(pool, 2)
    held = [pool.allocate(), pool.allocate()]
    assert pool.touched == 4
    assert pool.find(key(0)) is not None
    assert pool.find(key(1)) is not None
    for i, block in enumerate(held):
        pool.register(block, key(10 + i))
        pool.release(block)
    pool.allocate()
    assert pool.touched == 4, "beyond its share the cache gives blocks back"
    assert pool.find(key(0)) is None


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(2, keep_cached=2)
    a, b = pool.allocate(), pool.allocate()
    pool.register(a, key(1))
    pool.register(b, key(1))
    assert pool.find(key(1)) == a
    pool.release(b)
    pool.check_integrity([1, 0])
    assert pool.allocate() == b


def test_an_exhausted_pool_says_so() -> None:
    pool = BlockPool(1, keep_cached=1)
    pool.allocate()
    with pytest.raises(LookupError, match="exhausted"):
        pool.allocate()


@pytest.mark.parametrize("damage", ["holders", "lost", "key"])
def test_check_integrity_finds_damage(damage: str) -> None:
    pool = BlockPool(4, keep_cached=4)
    cached_blocks(pool, 2)
    held = pool.allocate()
    holders = [0, 0, 0, 0]
    holders[held] = 1
    pool.check_integrity(holders)
    if damage == "holders":
        holders[held] = 2
    elif damage == "lost":
        pool._cached.popitem()
    else:
        pool._by_key.popitem()
    with pytest.raises(AssertionError):
        pool.check_integrity(holders)


class PoolMachine(RuleBasedStateMachine):
    """Holds, releases and registers at random, keeping its own books."""

    @initialize(n_blocks=st.integers(1, 6), keep_cached=st.integers(0, 6))
    def start(self, n_blocks: int, keep_cached: int) -> None:
        self.pool = BlockPool(n_blocks, keep_cached)
        self.holders = [0] * n_blocks
        self.content: dict[int, int] = {}  # what the test says a block contains

    @precondition(lambda self: self.pool.free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert self.holders[block] == 0
        self.holders[block] = 1
        self.content.pop(block, None)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if held := [b for b, n in enumerate(self.holders) if n]:
            block = data.draw(st.sampled_from(held))
            self.pool.release(block)
            self.holders[block] -= 1

    @rule(data=st.data(), content=st.integers(0, 4))
    def register(self, data: st.DataObject, content: int) -> None:
        fresh = [b for b, n in enumerate(self.holders) if n and b not in self.content]
        if fresh:
            block = data.draw(st.sampled_from(fresh))
            self.pool.register(block, key(content))
            self.content[block] = content

    @rule(content=st.integers(0, 4))
    def find(self, content: int) -> None:
        block = self.pool.find(key(content))
        if block is not None:
            assert self.content[block] == content
            self.pool.hold(block)
            self.holders[block] += 1

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.holders)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
