from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
from localllm.backends.cpu import compiler
from localllm.backends.cpu.kernels import elementwise, rows

kernels = [elementwise.add(), elementwise.scale(), elementwise.act_mul("silu"),
           elementwise.softcap(), rows.select_rows, rows.position_scale]
ready = [kernel.is_ready() for kernel in kernels]
lines = []
if "broken" in sys.argv:
    compiler.sys.executable = "/nowhere/python"
compiler.compile_kernels(kernels, 2, lines.append)
print(json.dumps([ready, [k.is_ready() for k in kernels], all(k.address for k in kernels), lines]))
"""


def run(cache: Path, *arguments: str) -> list[Any]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "LOCALLLM_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    answer: list[Any] = json.loads(result.stdout)
    return answer


def test_helpers_compile_what_is_missing(tmp_path: Path) -> None:
    before, after, usable, lines = run(tmp_path)
    assert (before, after, usable) == ([False] * 6, [True] * 6, True)
    assert lines == [
        "compiling 6 kernels (first run only)",
        *[f"compiled {n} of 6 kernels" for n in range(1, 7)],
    ]
    before, after, usable, lines = run(tmp_path)
    assert (before, after, usable, lines) == ([True] * 6, [True] * 6, True, [])


def test_without_helpers_the_process_compiles_alone(tmp_path: Path) -> None:
    before, after, usable, lines = run(tmp_path, "broken")
    assert (before, after, usable) == ([False] * 6, [True] * 6, True)
    assert lines[-1] == "compiled 6 of 6 kernels"
