"""`scripts/bench_matmul`"""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import ROOT


def test_a_row_for_the_floor_and_for_each_format() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_matmul")]
    options = ["--formats", "Q2_K,F16", "--threads", "2", "--tries", "1", "--columns", "9"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=True
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == ["floor", "floor, floats", "Q2_K", "F16"]
    assert [row[1] for row in rows[4:]] == ["2.62", "16.00"]
    assert all(float(figure) > 0 for row in rows[2:] for figure in row[2:])
