"""`scripts/bench_vs_llamacpp` with stand-ins for llama.cpp's programs, which say how they ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import FIXTURES, ROOT

SCRIPT = ROOT / "scripts" / "bench_vs_llamacpp"
MODEL = FIXTURES / "architectures" / "llama-format-q4_1.gguf"

STAND_IN = """#!{python}
import json, sys
from pathlib import Path
with Path({log!r}).open("a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
print({answer!r})
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def stand_in(log: Path, name: str, answer: object) -> Path:
    path = log.with_name(name)
    path.write_text(STAND_IN.format(python=sys.executable, log=str(log), answer=json.dumps(answer)))
    path.chmod(0o755)
    return path


def compare(*options: str, model: Path = MODEL) -> list[list[str]]:
    """The table's cells."""
    command = [sys.executable, str(SCRIPT), str(model), "--pairs", "2", "--prompt-tokens", "20"]
    command += ["--gen-tokens", "4", "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line[1:-1].split("|") for line in done.stdout.splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_pairs_at_a_depth(log: Path) -> None:
    bench = stand_in(log, "bench", [{"avg_ts": 0.5}])
    prefill, decode = compare("--llama-bench", str(bench), "--depth", "30")
    assert prefill[:2] == [MODEL.name, "prefill 20"]
    assert decode[1] == "decode 4 at depth 30"
    for row in (prefill, decode):
        ours, theirs, ratio = float(row[2]), float(row[3]), float(row[4].split("x")[0])
        assert theirs == 0.5
        assert ratio == pytest.approx(ours / theirs, rel=0.01)
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    tests = [run[-4:] if "-d" not in run else run[-6:] for run in runs]
    assert tests == [["-p", "20", "-n", "0"], ["-p", "0", "-n", "4", "-d", "30"]] * 2
    assert all(run[:6] == ["-m", str(MODEL), "-t", "1", "-r", "1"] for run in runs)


@pytest.mark.model
@pytest.mark.parametrize("batched", [True, False])
def test_sequences_together(log: Path, smollm2: Path, batched: bool) -> None:
    """Of a real model: a tiny one has written its tokens before the next sequence arrives."""
    options = ["--pairs", "1", "--batch", "2,3"]
    options += ["--llama-bench", str(stand_in(log, "bench", [{"avg_ts": 1.0}]))]
    if batched:
        options += ["--llama-batched-bench", str(stand_in(log, "batched", {"speed_tg": 2.0}))]
    rows = compare(*options, model=smollm2)[2:]
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r[r.index("-npl") + 1] for r in runs if "-npl" in r] == ["2", "3"][: 2 * batched]
    for row, size in zip(rows, (2, 3), strict=True):
        assert row[1].startswith(f"decode 4, {size} together (")
        assert float(row[2]) > 0
        assert row[3] == ("2.0" if batched else "")
        assert bool(row[4]) == batched


def test_it_says_what_is_missing() -> None:
    command = [sys.executable, str(SCRIPT), str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={})
    assert done.returncode == 2
    assert "LLAMA_BENCH" in done.stderr


def test_company_burns_while_both_run(log: Path, tmp_path: Path) -> None:
    """The stand-in lists the burners that run beside it."""
    bench = stand_in(log, "bench", [{"avg_ts": 0.5}])
    seen = tmp_path / "seen"
    watch = "import psutil\n"
    watch += (
        "lines = [' '.join(p.info['cmdline'] or ()) for p in psutil.process_iter(['cmdline'])]\n"
    )
    watch += f"Path({str(seen)!r}).write_text(str(lines))\n"
    bench.write_text(bench.read_text().replace("with Path", watch + "with Path"))
    compare("--llama-bench", str(bench), "--burners", "2", "--pairs", "1")
    burner = f"{sys.executable} -c while True: pass"
    assert seen.read_text().count(burner) >= 2
