"""What the processes that localllm starts owe to the one that started them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STATUS = 70  # of a process that cannot go on

_log = logging.getLogger(__name__)


def _log_end(reason: str) -> None:
    _log.error("%s; this process ends", reason)


_tell_end: Callable[[str], None] = _log_end


def tie_to_parent(name: str, parent: int) -> None:
    """Signals that end the parent in an orderly way are its business; its death is ours.

    On Linux the kernel kills this process, called `name` from now on, when the thread that started
    it ends, even in the middle of a step; elsewhere the closed line is noticed after it. `parent`
    is the process that started it, which may have ended before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def on_end(tell: Callable[[str], None]) -> None:
    """Who hears from now on why `end_process` ends this process; else the log does."""
    global _tell_end
    _tell_end = tell


def end_process(reason: str) -> NoReturn:
    """Without waiting for threads that will never come back. Any thread may call."""
    try:
        _tell_end(reason)
    finally:  # heard or not
        os._exit(_STATUS)
