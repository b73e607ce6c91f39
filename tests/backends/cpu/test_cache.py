from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.backends.cpu import cache

SCRIPT = """
import json, sys
from localllm.backends.cpu import cache
from localllm.backends.cpu.kernels.rows import select_rows
before = select_rows.is_ready()
select_rows.address
print(json.dumps([before, select_rows.is_ready(), str(cache.directory())]))
"""


def run_script(cache_root: Path, script: str = SCRIPT) -> tuple[list[object], str]:
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LOCALLLM_CACHE": str(cache_root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(result.stdout), result.stderr


def test_a_second_process_finds_the_kernel(tmp_path: Path) -> None:
    first, _ = run_script(tmp_path)
    second, _ = run_script(tmp_path)
    assert first[:2] == [False, True]
    assert second == [True, True, first[2]]
    assert str(first[2]).startswith(str(tmp_path / "kernels"))


def test_a_damaged_file_is_compiled_anew(tmp_path: Path) -> None:
    run_script(tmp_path)
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[:100])
    _, log = run_script(tmp_path)
    assert "damaged" in log
    _, log = run_script(tmp_path)
    assert "damaged" not in log


def test_an_unwritable_place_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    (_, ready, directory), log = run_script(blocker)
    assert ready is True
    assert "cannot write the kernel cache" in log
    assert str(tmp_path) not in str(directory)
    assert not Path(str(directory)).exists()  # gone with the process


def test_the_key_covers_sources_and_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "kernels").mkdir(parents=True)
    (package / "kernels" / "some.py").write_text("x = 1\n")
    monkeypatch.setattr(cache, "__file__", str(package / "cache.py"))
    digests = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (package / "kernels" / "some.py").write_text(text)
        cache.source_digest.cache_clear()
        digests.append(cache.source_digest())
    cache.source_digest.cache_clear()
    assert digests[0] == digests[2] != digests[1]
    avx2, scalar = (cache.open_directory(isa, tmp_path / "kernels") for isa in ("avx2", "scalar"))
    assert avx2 != scalar
    assert avx2.parent == scalar.parent


def test_old_versions_are_pruned(tmp_path: Path) -> None:
    for age in range(6):
        old = tmp_path / f"version{age}"
        old.mkdir()
        os.utime(old, (1000 - age, 1000 - age))
    used = cache.open_directory("scalar", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {used.parent.name, "version0", "version1"}


def test_a_full_disk_does_not_stop_the_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.backends.cpu.kernel import Kernel
    from localllm.backends.cpu.kernels.rows import select_rows

    def no_space(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    monkeypatch.setattr(cache, "_directory", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert Kernel(select_rows.function).address > 0
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


COMPILE = """
from localllm.backends.cpu.kernels.norm import norm
norm("layer", True, {has_bias}).compile()
print("[]")
"""
BIAS_IN_USE = """
import ctypes, json
import numpy as np
from localllm.backends.cpu.kernels.norm import NormArgs, norm
for has_bias in (False, True):
    norm("layer", True, has_bias).compile()
x, out = np.zeros((2, 1, 8), np.float32)
weight, bias = np.ones(8, np.float32), np.arange(8, dtype=np.float32)
header, claimed = np.array([1] + 63 * [0]), np.zeros(8, np.int64)
own = NormArgs(*(v.ctypes.data if isinstance(v, np.ndarray) else v
                 for v in (out, 8, 0, 8, x, 8, 8, weight, 0, bias, 0, 1e-5))).words()
words = np.array([header.ctypes.data, claimed.ctypes.data, *own])
call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
call(norm("layer", True, True).address)(words.ctypes.data, 0, 1)
print(json.dumps(out[0].tolist()))
"""


def test_kernels_of_several_processes_keep_their_own_helpers(tmp_path: Path) -> None:
    for has_bias in (False, True):
        run_script(tmp_path, COMPILE.format(has_bias=has_bias))
    out, _ = run_script(tmp_path, BIAS_IN_USE)
    assert out == [0, 1, 2, 3, 4, 5, 6, 7]
