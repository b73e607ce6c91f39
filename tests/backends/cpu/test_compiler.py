from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
    answer, _ = run_in_full(cache, *arguments)
    return answer


def run_in_full(cache: Path, *arguments: str, flags: Sequence[str] = ()) -> tuple[list[Any], str]:
    """What the script prints, and its standard error."""
    result = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT, *arguments],
        env={**os.environ, "LOCALLLM_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    answer: list[Any] = json.loads(result.stdout)
    return answer, result.stderr


def test_helpers_compile_what_is_missing(tmp_path: Path) -> None:
    before, after, usable, lines = run(tmp_path)
    assert (before, after, usable) == ([False] * 6, [True] * 6, True)
    assert lines == [
        "compiling 6 kernels (first run only)",
        *[f"compiled {n} of 6 kernels" for n in range(1, 7)],
    ]
    before, after, usable, lines = run(tmp_path)
    assert (before, after, usable, lines) == ([True] * 6, [True] * 6, True, [])


def test_helpers_are_not_misled_by_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "localllm.py").write_text("raise RuntimeError('from the current folder')")
    monkeypatch.chdir(tmp_path)
    *_, stderr = run_in_full(tmp_path / "cache", flags=["-P"])
    assert stderr == ""


def test_without_helpers_the_process_compiles_alone(tmp_path: Path) -> None:
    before, after, usable, lines = run(tmp_path, "broken")
    assert (before, after, usable) == ([False] * 6, [True] * 6, True)
    assert lines[-1] == "compiled 6 of 6 kernels"


def test_a_helper_whose_parent_is_gone_says_nothing(tmp_path: Path) -> None:
    """Nobody reads its answer; the line that tells it what to compile is still there."""
    script = (
        "from localllm.backends.cpu import target\n"
        "from localllm.backends.cpu.kernels import elementwise\n"
        "print(target.current()); print(elementwise.add().origin.to_json())"
    )
    isa, kernel = subprocess.check_output(
        [sys.executable, "-c", script], text=True, timeout=300
    ).splitlines()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nowhere:
        result = subprocess.run(
            [sys.executable, "-m", "localllm.backends.cpu.compiler", isa, str(tmp_path)],
            input=kernel + "\n",
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert (result.returncode, result.stderr) == (0, "")
