"""Patience with ranks that are started at other times."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from localllm.errors import EngineError

PATIENCE = timedelta(seconds=300)
_TELL_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 60.0

_log = logging.getLogger(__name__)


class Wait:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tell_after = _TELL_SECONDS

    def go_on(self, what: str) -> None:
        """To be called now and then while `what` is not there: says so, sometimes.

        EngineError when it has been waited for long enough.
        """
        waited = time.monotonic() - self._began
        if waited > PATIENCE.total_seconds():
            raise EngineError(f"{what} has not come in {waited:.0f} s")
        if waited > self._tell_after:
            self._tell_after += _TELL_AGAIN_SECONDS
            _log.warning("waiting for %s", what)
