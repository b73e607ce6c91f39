"""How memory is shared out, in numbers small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.backends.base import MemoryInfo
from localllm.engine.memory import KVNeeds, check_weights_fit, kv_budget, plan_kv
from localllm.errors import InsufficientMemoryError

GB = 10**9
ONE_GROUP = KVNeeds(
    windows=[None], block_bytes=[1000], context=1600, least_context=256, seqs=4, chunk=64
)


def test_with_memory_to_spare_all_sequences_get_their_whole_context() -> None:
    plan = plan_kv(ONE_GROUP, 10**9, whole=False)
    assert (plan.context, plan.n_blocks, plan.bytes) == (1600, (400,), 400_000)
    assert plan.keep_cached == (100,)


def test_a_budget_is_used_up_and_not_passed() -> None:
    plan = plan_kv(ONE_GROUP, 150_999, whole=True)
    assert (plan.context, plan.n_blocks, plan.bytes) == (1600, (150,), 150_000)
    assert plan.keep_cached == (150,)


def test_the_context_shrinks_to_what_fits_alone() -> None:
    plan = plan_kv(ONE_GROUP, 50_500, whole=False)
    assert (plan.context, plan.n_blocks) == (800, (50,))


def test_too_little_for_the_least_context_is_refused_with_numbers() -> None:
    plan_kv(ONE_GROUP, 16_000, whole=False)
    with pytest.raises(InsufficientMemoryError, match=r"256 tokens needs 0\.02 MB.*0\.02 MB"):
        plan_kv(ONE_GROUP, 15_999, whole=False)
    with pytest.raises(InsufficientMemoryError, match="1600 tokens"):
        plan_kv(replace(ONE_GROUP, least_context=1600), 99_999, whole=False)


def test_a_window_group_stops_at_what_its_sequences_can_see() -> None:
    needs = replace(ONE_GROUP, windows=[None, 32], block_bytes=[1000, 500])
    plan = plan_kv(needs, 10**9, whole=False)
    assert plan.n_blocks == (400, 4 * 7)  # 31 + 64 tokens touch at most 7 blocks
    assert plan.bytes == 400 * 1000 + 28 * 500


def test_short_of_memory_groups_hold_as_many_tokens_each() -> None:
    needs = replace(ONE_GROUP, windows=[None, 800], block_bytes=[1000, 1000])
    plan = plan_kv(needs, 210_000, whole=False)
    assert plan.context == 1600
    assert plan.n_blocks == (105, 105)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 2000)), min_size=1, max_size=3),
    size=st.integers(1, 5000),
    budget=st.integers(0, 10**7),
    context=st.integers(1, 5000),
    seqs=st.integers(1, 20),
    chunk=st.integers(1, 600),
)
def test_one_sequence_always_fits_and_the_budget_holds(
    windows: list[int | None], size: int, budget: int, context: int, seqs: int, chunk: int
) -> None:
    needs = KVNeeds(
        windows=windows,
        block_bytes=[size] * len(windows),
        context=context,
        least_context=min(context, 256),
        seqs=seqs,
        chunk=chunk,
    )
    try:
        plan = plan_kv(needs, budget, whole=False)
    except InsufficientMemoryError:
        assert needs.bytes(needs.blocks(needs.least_context)) > budget
        return
    assert needs.bytes(plan.n_blocks) == plan.bytes <= budget
    assert needs.least_context <= plan.context <= context
    alone = needs.blocks(plan.context)
    assert all(a <= n <= seqs * a for a, n in zip(alone, plan.n_blocks, strict=True))


def test_half_of_what_is_left_beside_the_reserve() -> None:
    memory = MemoryInfo(total=16 * GB, available=9 * GB)
    assert kv_budget(memory, workspace=GB, asked=None) == (8 * GB - GB) // 2
    assert kv_budget(MemoryInfo(16 * GB, GB), workspace=0, asked=None) == GB // 4
    assert kv_budget(MemoryInfo(16 * GB, GB), workspace=GB, asked=None) == 0


@pytest.mark.parametrize("asked", [None, 1000])
def test_buffers_beyond_the_memory_are_refused_with_what_decides_them(asked: int | None) -> None:
    says = r"step need 2,000 MB; 1,000 MB of 16,000 MB .* max_num_batched_tokens or max_num_seqs"
    with pytest.raises(InsufficientMemoryError, match=says):
        kv_budget(MemoryInfo(16 * GB, GB), workspace=2 * GB, asked=asked)


def test_of_a_gpu_only_what_utilization_says_stays_free() -> None:
    memory = MemoryInfo(total=80 * GB, available=60 * GB, dedicated=True)
    assert kv_budget(memory, workspace=GB, asked=None, utilization=0.75) == 39 * GB
    assert kv_budget(memory, workspace=GB, asked=None, utilization=1.0) == 59 * GB
    assert kv_budget(memory, workspace=GB, asked=39 * GB, utilization=0.75) == 39 * GB
    with pytest.raises(InsufficientMemoryError, match="39,000 MB of 80,000 MB"):
        kv_budget(memory, workspace=GB, asked=40 * GB, utilization=0.75)
    with pytest.raises(InsufficientMemoryError, match="50,000 MB; 40,000 MB of 80,000 MB"):
        kv_budget(memory, workspace=50 * GB, asked=None, utilization=0.75)


def test_a_wish_is_granted_or_refused_with_numbers() -> None:
    memory = MemoryInfo(total=16 * GB, available=9 * GB)
    assert kv_budget(memory, workspace=GB, asked=8 * GB) == 8 * GB
    with pytest.raises(InsufficientMemoryError, match=r"8,001 MB does not fit: 8,000 MB of 16,000"):
        kv_budget(memory, workspace=GB, asked=8001 * 10**6)


def test_weights_beyond_the_memory_are_refused_before_they_are_loaded() -> None:
    memory = MemoryInfo(total=16 * GB, available=9 * GB)
    check_weights_fit(memory, 9 * GB)
    with pytest.raises(InsufficientMemoryError, match=r"needs 9,001 MB .* 9,000 MB of 16,000 MB"):
        check_weights_fit(memory, 9001 * 10**6)
