"""No content of one tenant in another's answer; fault 17 of those that peers are known for."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.helpers import FIXTURES, ROOT

SCRIPT = ROOT / "scripts" / "canary_fuzz"
MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
REQUESTS = os.environ.get("LOCALLLM_CANARY_REQUESTS", "400")


def test_fault_17_content_does_not_leak_between_tenants() -> None:
    """With a cache that holds two conversations, so that blocks go from hand to hand."""
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(MODEL), "--requests", REQUESTS),
            *("--", "--kv-cache-memory", "1700kB", "--ctx-size", "208"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"(\d+) evictions, (\d+) preemptions: 0 faults", done.stdout)
    assert told, done.stdout
    assert int(told[1]) > 100
    assert int(told[2]) > 0
