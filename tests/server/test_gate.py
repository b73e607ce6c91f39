"""How many requests may be inside at once, and how soon the others are told to come again."""

from __future__ import annotations

import pytest

from localllm.server.auth import ANYBODY, Tenant
from localllm.server.errors import TooManyRequestsError
from localllm.server.gate import Gate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_capacity() -> None:
    gate = Gate(2)
    gate.enter(ANYBODY)
    gate.enter(ANYBODY)
    with pytest.raises(TooManyRequestsError) as refused:
        gate.enter(ANYBODY)
    assert refused.value.code == "queue_full"
    assert refused.value.retry_after >= 1
    gate.leave(ANYBODY)
    gate.enter(ANYBODY)
    assert gate.inside == 2


def test_a_tenants_own_share() -> None:
    gate = Gate(10)
    few = Tenant("few", max_concurrent=1)
    gate.enter(few)
    with pytest.raises(TooManyRequestsError) as refused:
        gate.enter(few)
    assert refused.value.code == "too_many_concurrent_requests"
    gate.enter(Tenant("other", max_concurrent=1))
    gate.leave(few)
    gate.enter(few)


def test_a_rate_is_a_bucket_that_fills_up() -> None:
    clock = Clock()
    gate = Gate(1000, clock)
    tenant = Tenant("t", requests_per_minute=30)
    for _ in range(30):
        gate.enter(tenant)
    with pytest.raises(TooManyRequestsError) as refused:
        gate.enter(tenant)
    assert refused.value.retry_after == 2
    clock.now += 2
    gate.enter(tenant)
    with pytest.raises(TooManyRequestsError):
        gate.enter(tenant)
    clock.now += 3600
    for _ in range(30):
        gate.enter(tenant)
    with pytest.raises(TooManyRequestsError):
        gate.enter(tenant)


def test_what_is_refused_counts_for_nothing() -> None:
    gate = Gate(1, Clock())
    tenant = Tenant("t", requests_per_minute=2)
    gate.enter(tenant)
    for _ in range(5):
        with pytest.raises(TooManyRequestsError, match="no room"):
            gate.enter(tenant)
    gate.leave(tenant)
    gate.enter(tenant)
    gate.leave(tenant)
    assert gate.inside == 0


def test_the_wait_follows_the_pace_of_departures() -> None:
    clock = Clock()
    gate = Gate(1, clock)
    for _ in range(40):
        gate.enter(ANYBODY)
        clock.now += 7
        gate.leave(ANYBODY)
    gate.enter(ANYBODY)
    with pytest.raises(TooManyRequestsError) as refused:
        gate.enter(ANYBODY)
    assert refused.value.retry_after == 7
