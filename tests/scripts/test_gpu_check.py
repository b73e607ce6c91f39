"""`scripts/gpu_check`: nothing is claimed without a GPU, and all of its code runs without one.

Both with an import hook that lets nothing pass but torch, Triton, what these two need, and us.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.torch

SCRIPT = ROOT / "scripts" / "gpu_check"
OURS = {"localllm", "gpu_checks", "random_model"}
# Run by every Python that finds it on its path.
HOOK = """
import sys
ALLOWED = {allowed!r} | sys.stdlib_module_names

class Bare:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and not top.startswith("_"):
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

sys.meta_path[:] = [Bare(list(sys.meta_path))]
"""


def distributions(*names: str) -> set[str]:
    """These and all that they require."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in needed if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without GPU and with next to nothing installed."""
    present = distributions("torch", "triton", "numpy")
    allowed = {
        module
        for module, owners in packages_distributions().items()
        if present & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
    }
    assert {"torch", "triton", "numpy"} <= allowed
    assert not allowed & {"gguf", "numba", "fastapi", "psutil", "tokenizers", "pytest"}
    folder = tmp_path_factory.mktemp("hook")
    (folder / "sitecustomize.py").write_text(HOOK.format(allowed=allowed | OURS))
    return {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=550, check=False
    )


def figures(found: Any) -> Iterator[dict[str, Any]]:
    """All that stands beside a goal."""
    if isinstance(found, dict):
        if "met" in found:
            yield found
        for value in found.values():
            yield from figures(value)


def test_the_hook_blocks(bare: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import torch, numpy, json; import gguf"]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120)
    assert "No module named 'gguf'" in done.stderr


def test_without_a_gpu_nothing_is_claimed(bare: dict[str, str]) -> None:
    done = run(bare)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["gpu"] is None
    assert "nothing is claimed" in result["note"]
    assert list(result["parts"]) == ["environment"]
    assert not any(result["goals"].values())


def test_without_torch_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(allowed={"numpy"} | OURS))
    done = run({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    assert done.stderr == "gpu_check: torch and triton must be installed first\n"
    result = json.loads(done.stdout)
    assert result["gpu"] is None
    assert "nothing is claimed" in result["note"]


def test_a_rehearsal_runs_to_its_end(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run(bare, "--rehearse", "--out", str(out), "--seconds", "540")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["gpu"], result["rehearsal"]) == (None, True)
    assert "measures nothing" in result["note"]
    assert result["goals"]["missed"] == []

    parts = result["parts"]
    expected = "environment kernels conformance compile speed fast transformers"
    assert list(parts) == expected.split()
    assert {part["state"] for part in parts.values()} == {"done"}
    for name in ("kernels", "conformance"):
        exact = list(figures(parts[name]))
        assert len(exact) > 5
        assert all(figure["met"] is True for figure in exact), name
    for name in ("speed", "fast"):
        timed = list(figures(parts[name]))
        assert len(timed) > 5
        assert all(figure["value"] is figure["met"] is None for figure in timed), name
    assert "No module named 'transformers'" in parts["transformers"]["found"]["why"]


def test_a_kill_loses_no_finding(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--rehearse", "--parts", "kernels", "--out", str(out)]
    with subprocess.Popen(command, env=bare, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and "MXFP4" not in (out.read_text() if out.exists() else ""):
            time.sleep(0.1)
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 143, log
    parts = json.loads(out.read_text())["parts"]
    assert parts["environment"]["state"] == "done"
    assert parts["kernels"]["state"] == "running"
    assert parts["kernels"]["found"]["Q4_K"]["1 columns"]["met"] is True


def test_a_part_that_fails_says_why(bare: dict[str, str], tmp_path: Path) -> None:
    hook = Path(bare["PYTHONPATH"]) / "sitecustomize.py"
    (tmp_path / hook.name).write_text(hook.read_text().replace("'random_model'", "'nothing'"))
    done = run({**bare, "PYTHONPATH": str(tmp_path)}, "--rehearse", "--parts", "speed")
    assert done.returncode == 1
    speed = json.loads(done.stdout.splitlines()[-1])["parts"]["speed"]
    assert speed["state"] == "failed"
    assert "No module named 'random_model'" in speed["found"]["error"]


def test_a_part_without_time_is_left_out_and_says_so(bare: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run(bare, "--rehearse", "--out", str(out), "--seconds", "45", "--parts", "speed")
    result = json.loads(out.read_text())
    assert done.returncode == 0, done.stderr
    assert result["parts"]["environment"]["state"] == "done"
    assert result["parts"]["speed"]["state"] == "skipped: no time was left"
    refused = run(bare, "--parts", "all")
    assert refused.returncode == 2
    assert "no part 'all'" in refused.stderr
