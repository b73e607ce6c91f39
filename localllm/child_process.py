"""What the processes that localllm starts owe to the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


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
