"""Rotary positions against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.cpu.kernels.rope import (
    RopeArgs,
    RopeTableArgs,
    rope,
    rope_table,
    table_floats,
)
from tests.backends.cpu.kernels.harness import Header, address, run

POSITIONS = np.array([0, 1, 7, 4095, 131_071, 999_999], np.int32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (16, 8), (80, 20), (20, 5), (6, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_rotates_by_the_angle(head_dim: int, pairs: int, interleaved: bool, threads: int) -> None:
    rng = np.random.default_rng(0)
    heads, offset, scale = 3, 5, 1.25
    freq = 10000.0 ** -(np.arange(pairs) / pairs)
    t = len(POSITIONS)
    buffer = rng.standard_normal((t, 128 * 3)).astype(np.float32)  # x is a window of it
    x = buffer[:, offset : offset + heads * head_dim].reshape(t, heads, head_dim)
    out = np.full((t, heads * head_dim + 8), np.nan, np.float32)
    table = np.empty((t, table_floats(pairs)), np.float32)
    header = Header(tokens=t, positions=POSITIONS)

    run(
        rope_table,
        RopeTableArgs(address(freq), pairs, scale, interleaved, address(table)),
        header,
        threads,
    )
    run(
        rope,
        RopeArgs(
            x=address(buffer) + offset * 4,
            x_stride=buffer.shape[1],
            out=address(out),
            out_stride=out.shape[1],
            heads=heads,
            head_dim=head_dim,
            pairs=pairs,
            interleaved=interleaved,
            table=address(table),
        ),
        header,
        threads,
    )

    angles = POSITIONS[:, None] * freq
    turn = (scale * np.exp(1j * angles))[:, None]
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    turned = (x[..., first] + 1j * x[..., second].astype(np.float64)) * turn
    expected = x.astype(np.float64)
    expected[..., first], expected[..., second] = turned.real, turned.imag
    result = out[:, :-8].reshape(t, heads, head_dim)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(result[..., 2 * pairs :], x[..., 2 * pairs :])
    assert np.isnan(out[:, -8:]).all()
