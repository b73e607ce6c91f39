from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu import target
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.program import KVGroup, KVLayer
from localllm.errors import LocalLLMError

# Prints a digest of the logits of every program, with each instruction set on its own.
SCRIPT = """
import hashlib, json, sys
from localllm.backends.cpu.backend import CpuBackend
from tests.backends.cpu.programs import PROGRAMS, random_tensors
from tests.backends.cpu.test_programs import SEQUENCES, mixed, runner

backend = CpuBackend(2, isa=sys.argv[1])
digests = {}
for name, make in PROGRAMS.items():
    program = make()
    logits = runner(backend, program, random_tensors(program, mixed)).logits(*SEQUENCES, chunk=30)
    digests[name] = hashlib.sha256(b"".join(rows.tobytes() for rows in logits)).hexdigest()
print(json.dumps([backend.isa, digests]))
"""


def digests(isa: str) -> list[object]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, isa],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    answer: list[object] = json.loads(result.stdout)
    return answer


def test_every_instruction_set_gives_the_same_bytes() -> None:
    """The scalar one runs anywhere and is the plainest."""
    (best, fast), (isa, plain) = digests("auto"), digests("scalar")
    assert isa == "scalar"
    assert best == target.resolve("auto")
    assert fast == plain


def test_the_instruction_set_is_the_processs() -> None:
    with pytest.raises(LocalLLMError, match="unknown isa"):
        CpuBackend(1, isa="mmx")
    backend = CpuBackend(1)
    assert backend.isa == target.current()
    backend.close()


def test_description() -> None:
    backend = CpuBackend(3)
    assert backend.threads == 3
    assert backend.describe().endswith(f"{backend.isa}, 3 threads (as asked)")
    backend.close()
    backend = CpuBackend()
    assert f"{backend.threads} thread" in backend.describe()
    backend.close()


def test_cache_memory_is_untouched_at_first() -> None:
    group = KVGroup(None, [KVLayer(8, 128, 128)] * 4)
    backend = CpuBackend(1)
    block = backend.kv_block_bytes(group)
    assert block == 4 * 8 * (128 + 128) * BLOCK_TOKENS * 2
    before = psutil.Process().memory_info().rss
    (cache,) = backend.alloc_kv([group], [1000])
    assert cache.memory.nbytes == 1000 * block
    assert psutil.Process().memory_info().rss - before < 100 * block
    backend.close()
