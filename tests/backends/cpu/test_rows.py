from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localllm.backends.cpu.kernels.rows import RowsArgs, position_scale, select_rows


def test_select_rows_gathers_a_window(run_kernel: Callable[..., None]) -> None:
    wide = np.random.default_rng(0).normal(size=(7, 40)).astype(np.float32)
    x = wide[:, 5:30]
    out = np.full((3, 32), 7.0, np.float32)
    chosen = np.array([1, 4, 6], np.int32)
    arguments = RowsArgs(out.ctypes.data, 32, 25, x.ctypes.data, 40)
    run_kernel(select_rows, arguments, tokens=7, logit_rows=chosen, threads=2)
    assert np.array_equal(out[:, :25], x[chosen])
    assert (out[:, 25:] == 7.0).all()


def test_position_scale(run_kernel: Callable[..., None]) -> None:
    x = np.random.default_rng(0).normal(size=(5, 19)).astype(np.float32)
    positions = np.array([0, 99, 100, 8191, 100_000], np.int32)
    out = np.zeros_like(x)
    arguments = RowsArgs(out.ctypes.data, 19, 19, x.ctypes.data, 19, 0.1, 100.0, 1.0)
    run_kernel(position_scale, arguments, tokens=5, positions=positions)
    factor = 1 + 0.1 * np.log(1 + np.floor((positions + 1.0) / 100.0))
    assert np.allclose(out, x * factor[:, None], rtol=1e-6)
