"""Who may come in: a bounded number of requests, and each tenant's own limits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from localllm.server.auth import Tenant
from localllm.server.errors import TooManyRequestsError

_LONGEST_WAIT = 60
_NEWEST_WEIGHT = 0.2


class Gate:
    """Lets at most `capacity` requests in at a time. What it refuses has cost nothing yet."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._inside: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}
        self._pace = 1.0  # seconds from one departure to the next, lately
        self._last_departure: float | None = None

    @property
    def inside(self) -> int:
        return self._inside.total()

    def enter(self, tenant: Tenant) -> None:
        """TooManyRequestsError, which says when to come again, or `leave` must follow."""
        if self.inside >= self._capacity:
            raise TooManyRequestsError(
                f"{self._capacity} requests are being answered or wait, and there is no room for "
                "more",
                code="queue_full",
                retry_after=self._wait(),
            )
        most = tenant.max_concurrent
        if most is not None and self._inside[tenant.name] >= most:
            raise TooManyRequestsError(
                f"This API key may have {most} requests open at a time",
                code="too_many_concurrent_requests",
                retry_after=self._wait(),
            )
        self._take_from_bucket(tenant)
        self._inside[tenant.name] += 1

    def leave(self, tenant: Tenant) -> None:
        self._inside[tenant.name] -= 1
        now = self._clock()
        if self._last_departure is not None:
            self._pace += _NEWEST_WEIGHT * (now - self._last_departure - self._pace)
        self._last_departure = now

    def _wait(self) -> int:
        """Whole seconds until somebody will probably have left."""
        return max(1, min(_LONGEST_WAIT, math.ceil(self._pace)))

    def _take_from_bucket(self, tenant: Tenant) -> None:
        rate = tenant.requests_per_minute
        if rate is None:
            return
        bucket = self._buckets.setdefault(tenant.name, _Bucket(rate, self._clock()))
        if wait := bucket.take(self._clock()):
            raise TooManyRequestsError(
                f"This API key may make {rate} requests a minute",
                code="rate_limit_exceeded",
                retry_after=math.ceil(wait),
            )


class _Bucket:
    """A minute's worth of requests at most, filled up evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = self._level = float(per_minute)
        self._filled = now

    def take(self, now: float) -> float:
        """0 when one was there; else the seconds until there is one."""
        per_second = self._most / 60
        self._level = min(self._most, self._level + (now - self._filled) * per_second)
        self._filled = now
        if self._level < 1:
            return (1 - self._level) / per_second
        self._level -= 1
        return 0.0
