"""Block tables and prefix hits over groups with and without a sliding window."""

from __future__ import annotations

from array import array

import pytest

from localllm.engine.kv_manager import NO_BLOCK, KVManager, SequenceBlocks, most_blocks

SIZE = 4


def manager(
    windows: list[int | None], n_blocks: int = 32, *, prefix_cache: bool = True
) -> KVManager:
    return KVManager(windows, [n_blocks] * len(windows), SIZE, prefix_cache=prefix_cache)


def compute(kv: KVManager, tokens: array[int], salt: str = "", chunk: int = 6) -> SequenceBlocks:
    """A sequence whose tokens are all computed, in chunks, without looking for a prefix."""
    blocks = kv.new_sequence(salt)
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        assert kv.grow(blocks, end)
        kv.commit(blocks, tokens, end)
    return blocks


def hit(kv: KVManager, tokens: array[int], salt: str = "") -> int:
    """How many tokens of a prompt the cache serves; the last one is never asked for."""
    return kv.find_prefix(kv.new_sequence(salt), tokens, len(tokens) - 1).tokens


PROMPT = array("i", range(100, 121))  # 21 tokens: five blocks and one token


def test_a_prefix_of_whole_blocks_is_found_and_shared() -> None:
    kv = manager([None])
    first = compute(kv, PROMPT)
    second = kv.new_sequence("")
    prefix = kv.find_prefix(second, PROMPT, len(PROMPT) - 1)
    kv.admit(second, prefix)
    assert prefix.tokens == 20
    assert second.tables[0] == first.tables[0][:5]
    kv.check_integrity([first, second])
    kv.release(first)
    kv.check_integrity([second])
    kv.release(second)
    assert kv.usage() == 0.0
    assert hit(kv, PROMPT) == 20


def test_the_last_token_of_a_prompt_is_never_served() -> None:
    kv = manager([None])
    compute(kv, PROMPT[:20])
    assert hit(kv, PROMPT[:20]) == 16


def test_another_beginning_or_salt_shares_nothing() -> None:
    kv = manager([None])
    compute(kv, PROMPT, salt="a")
    assert hit(kv, PROMPT, salt="a") == 20
    assert hit(kv, PROMPT, salt="b") == 0
    assert hit(kv, array("i", [99]) + PROMPT[1:], salt="a") == 0
    assert hit(kv, PROMPT[:9] + array("i", [0] * 12), salt="a") == 8


def test_blocks_are_found_only_after_their_step() -> None:
    kv = manager([None])
    blocks = kv.new_sequence("")
    assert kv.grow(blocks, len(PROMPT))
    assert hit(kv, PROMPT) == 0
    assert list(kv.pending_keys(blocks, PROMPT, 9)) == blocks.keys[:2]
    kv.commit(blocks, PROMPT, 9)
    assert hit(kv, PROMPT) == 8
    assert list(kv.pending_keys(blocks, PROMPT, 12)) == blocks.keys[2:3]


def test_without_prefix_cache_nothing_is_found_or_hashed() -> None:
    kv = manager([None, 6], prefix_cache=False)
    blocks = compute(kv, PROMPT)
    assert hit(kv, PROMPT) == 0
    assert blocks.keys == []
    assert kv.pending_keys(blocks, PROMPT, 20) == ()
    kv.release(blocks)
    assert kv.grow(kv.new_sequence(""), 32 * SIZE), "every block is free again"


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 16])
def test_a_window_group_holds_what_the_next_token_sees(window: int) -> None:
    kv = manager([None, window])
    blocks = compute(kv, PROMPT)
    kv.check_integrity([blocks])
    first = max(0, len(PROMPT) - window + 1) // SIZE
    assert list(blocks.tables[1][:first]) == [NO_BLOCK] * first
    assert NO_BLOCK not in blocks.tables[1][first:]
    assert NO_BLOCK not in blocks.tables[0]
    assert hit(kv, PROMPT) == 20, "what the window left behind can still be found"


def test_a_hit_needs_the_window_before_its_end_and_no_more() -> None:
    kv = manager([None, 6])
    first = compute(kv, PROMPT)
    window = kv.pools[1]
    freed = [window.find(k) for k in first.keys[:4]]
    assert all(b is not None and window.is_free(b) for b in freed)
    while window.find(first.keys[2]) is not None:  # push out what was left behind
        window.allocate()
    assert hit(kv, PROMPT) == 20
    assert hit(kv, PROMPT[:18]) == 0, "16 tokens would need blocks 2 and 3"
    second = kv.new_sequence("")
    kv.admit(second, kv.find_prefix(second, PROMPT, 20))
    assert list(second.tables[1][:3]) == [NO_BLOCK] * 3
    assert list(second.tables[1][3:]) == [window.find(k) for k in first.keys[3:5]]


def test_a_full_group_leaves_the_others_unchanged() -> None:
    kv = KVManager([None, 6], [8, 1], SIZE)
    blocks = kv.new_sequence("")
    assert not kv.grow(blocks, 5)
    assert not any(blocks.tables)
    assert kv.grow(blocks, 4)
    kv.check_integrity([blocks])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = manager([None], n_blocks=5)
    kv.release(compute(kv, PROMPT[:20]))
    assert kv.grow(kv.new_sequence(""), 2 * SIZE)
    assert hit(kv, PROMPT) == 12


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 12])
@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 40])
def test_most_blocks_is_reached_and_never_passed(window: int | None, chunk: int) -> None:
    for n_tokens in (1, 4, 5, 30, 33):
        peak = 0
        for first in range(1, chunk + 1):  # chunks that start anywhere in a block
            kv = manager([window])
            blocks, done, end = kv.new_sequence(""), 0, min(first, n_tokens)
            tokens = array("i", range(n_tokens))
            while done < n_tokens:
                assert kv.grow(blocks, end)
                peak = max(peak, len(blocks.tables[0]) - blocks.live_from[0])
                kv.commit(blocks, tokens, end)
                done, end = end, min(end + chunk, n_tokens)
        bound = most_blocks(window, n_tokens, chunk, SIZE)
        assert peak <= bound
        if window is None or chunk >= SIZE:
            assert peak >= bound - 1


def test_integrity_notices_two_contents_in_one_block() -> None:
    kv = manager([None])
    first, second = compute(kv, PROMPT), compute(kv, array("i", [7] * 21))
    kv.pools[0].release(second.tables[0][0])
    second.tables[0][0] = first.tables[0][0]
    kv.pools[0].hold(first.tables[0][0])
    with pytest.raises(AssertionError, match="two contents"):
        kv.check_integrity([first, second])
