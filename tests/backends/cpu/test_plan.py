from __future__ import annotations

import random
from itertools import pairwise

import pytest

from localllm.backends.cpu.kernels.arguments import Arguments
from localllm.backends.cpu.kernels.rows import select_rows
from localllm.backends.cpu.plan import Buffer, Plan, Region, whole


def add(plan: Plan, reads: list[Region], writes: list[Region]) -> None:
    plan.add(0, select_rows, Arguments, reads, writes)


def test_independent_calls_do_not_wait_for_each_other() -> None:
    x, panel, qkv, out = (Buffer(1000) for _ in range(4))
    plan = Plan()
    add(plan, [], [whole(x)])
    add(plan, [whole(x)], [whole(panel)])
    add(plan, [whole(panel)], [Region(qkv, 0, 64)])
    add(plan, [whole(panel)], [Region(qkv, 64, 80)])
    add(plan, [whole(panel)], [Region(qkv, 80, 96)])
    add(plan, [Region(qkv, 0, 64), whole(x)], [whole(out)])
    add(plan, [Region(qkv, 60, 70), whole(out), whole(panel)], [whole(x)])
    plan.finish()
    # The second and third projection know from the first that the panel is finished.
    assert plan.needs == [-1, 0, 1, -1, -1, 2, 5]


def test_buffers_that_are_never_alive_together_share_memory() -> None:
    buffers = [Buffer(1 << 20) for _ in range(20)]
    plan = Plan()
    add(plan, [], [whole(buffers[0])])
    for previous, current in pairwise(buffers):
        add(plan, [whole(previous)], [whole(current)])
    plan.finish()
    assert plan.workspace_bytes == 2 << 20
    # Written over while the call before may still read: everything is in turn.
    assert plan.needs == list(range(-1, 19))


def test_a_lasting_buffer_shares_with_none() -> None:
    plan = Plan()
    lasting, a, b = Buffer(100), Buffer(64), Buffer(64)
    plan.lasting.append(lasting)
    add(plan, [], [whole(a)])
    add(plan, [whole(a)], [whole(b)])
    plan.finish()
    plan.bind(1 << 12)
    assert lasting.address % 64 == 0
    places = sorted((buffer.address, buffer.n_bytes) for buffer in (lasting, a, b))
    assert all(at + size <= after for (at, size), (after, _) in pairwise(places))
    assert plan.workspace_bytes == 128 + 64 + 64


def test_turns_need_no_memory() -> None:
    turns = Buffer(0)
    plan = Plan()
    add(plan, [], [Region(turns, 0, 1)])
    add(plan, [], [Region(turns, 1, 2)])
    add(plan, [Region(turns, 0, 1)], [])
    plan.finish()
    assert plan.workspace_bytes == 0
    assert plan.needs == [-1, -1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_any_two_calls_on_the_same_memory_are_in_turn(seed: int) -> None:
    choose = random.Random(seed)
    buffers = [Buffer(choose.randrange(1, 5000)) for _ in range(40)]
    plan = Plan()
    for at, buffer in enumerate(buffers):
        reads = [whole(b) for b in choose.sample(buffers[:at], min(at, 2))]
        add(plan, reads, [whole(buffer)])
    plan.finish()
    finished_before = list[int]()  # for each call, all calls up to this one are finished
    for need in plan.needs:
        finished_before.append(max([need, *finished_before[-1:]]))
    for later, call in enumerate(plan.calls):
        for earlier in range(finished_before[later] + 1, later):
            for a in (*call.reads, *call.writes):
                for b in (*plan.calls[earlier].reads, *plan.calls[earlier].writes):
                    written = a in call.writes or b in plan.calls[earlier].writes
                    disjoint = (
                        a.buffer.offset + a.buffer.n_bytes <= b.buffer.offset
                        or b.buffer.offset + b.buffer.n_bytes <= a.buffer.offset
                    )
                    assert disjoint or not written
