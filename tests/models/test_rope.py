from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from localllm.models.rope import RopeScaling, inverse_frequencies, rope_table

DIMS, BASE = 64, 10000.0
PLAIN: list[float] = [BASE ** (-2 * pair / DIMS) for pair in range(DIMS // 2)]


def test_unscaled_frequencies_are_powers_of_the_base() -> None:
    table = rope_table(DIMS, BASE, interleaved=True)
    np.testing.assert_allclose(table.inv_freq, PLAIN, rtol=1e-14)
    assert table.inv_freq.dtype == np.float64
    assert table.scale == 1.0
    assert table.interleaved


def test_linear_scaling_divides_positions() -> None:
    table = rope_table(
        DIMS, BASE, interleaved=False, scaling=RopeScaling(kind="linear", factor=4.0)
    )
    np.testing.assert_allclose(4 * table.inv_freq, PLAIN, rtol=1e-14)
    assert table.scale == 1.0


def test_a_factor_counts_for_nothing_without_scaling() -> None:
    table = rope_table(DIMS, BASE, interleaved=False, scaling=RopeScaling(factor=4.0))
    np.testing.assert_allclose(table.inv_freq, PLAIN, rtol=1e-14)


def test_factors_divide_pair_by_pair_before_scaling() -> None:
    factors = np.linspace(1, 8, DIMS // 2)
    scaling = RopeScaling(kind="longrope", factor=2.0, attention_factor=1.25)
    table = rope_table(DIMS, BASE, interleaved=False, scaling=scaling, factors=factors)
    np.testing.assert_allclose(table.inv_freq, PLAIN / factors / 2, rtol=1e-14)
    assert table.scale == 1.25


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_between() -> None:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_context=4096)
    ratio = rope_table(DIMS, BASE, interleaved=False, scaling=scaling).inv_freq / PLAIN

    def turns(pair: int) -> float:
        """How often the pair turns within the original context."""
        return 4096 * PLAIN[pair] / (2 * math.pi)

    for pair in range(DIMS // 2):
        if turns(pair) > 32:
            assert ratio[pair] == pytest.approx(1.0)
        elif turns(pair) < 1 and turns(pair - 1) < 1:
            assert ratio[pair] == pytest.approx(1 / 8)
    ramp = ratio[(ratio < 0.999) & (ratio > 0.126)]
    assert len(ramp) > 5
    np.testing.assert_allclose(np.diff(ramp, 2), 0, atol=1e-12)  # a straight line


YARN = RopeScaling(kind="yarn", factor=16.0, original_context=4096)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (YARN, 1 + 0.1 * math.log(16)),
        (replace(YARN, attention_factor=0.5), 0.5 * (1 + 0.1 * math.log(16))),
        (replace(YARN, log_multiplier=1.0), 1.0),
        (replace(YARN, factor=0.5), 1.0),
    ],
)
def test_yarn_magnitude(scaling: RopeScaling, expected: float) -> None:
    table = rope_table(DIMS, BASE, interleaved=False, scaling=scaling)
    assert table.scale == pytest.approx(expected)


def test_two_dimensions_do_not_turn_into_nothing() -> None:
    assert inverse_frequencies(2, BASE).tolist() == [1.0]
    scaling = RopeScaling(kind="yarn", factor=2.0, original_context=64)
    assert np.isfinite(rope_table(2, BASE, interleaved=False, scaling=scaling).inv_freq).all()
