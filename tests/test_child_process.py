"""How a process of localllm ends that cannot go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

BROKEN = "def tell(reason):\n    raise BrokenPipeError\non_end(tell)\n"


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("", "rank 1 is gone; this process ends\n"),
        (
            "on_end(lambda reason: sys.stderr.write(f'to the server: {reason}\\n'))\n",
            "to the server: rank 1 is gone\n",
        ),
        (BROKEN, ""),
    ],
    ids=["logged", "told", "nobody to tell"],
)
def test_the_reason_is_told_and_no_thread_waited_for(setup: str, told: str) -> None:
    code = (
        "import sys, threading\n"
        "from localllm.child_process import end_process, on_end\n"
        f"{setup}"
        "threading.Thread(target=lambda: end_process('rank 1 is gone')).start()\n"
        "threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (70, told)
