"""Products against numpy, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.cpu.matmul import FORMATS
from localllm.gguf import TensorType
from tests.backends.cpu.matmul.products import (
    FLOATS,
    SUPER_BLOCKS,
    Floats,
    Matrix,
    as_multiplied,
    dequantize,
    extreme_weights,
    random_weights,
    step_of_k,
)

every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)


def columns(kind: TensorType, blocks: int) -> int:
    """A width of some blocks, and of float formats one that is no multiple of anything."""
    return 32 * blocks + 11 if kind in FLOATS else step_of_k(kind) * blocks


def random_rows(n: int, cols: int, seed: int = 1) -> Floats:
    """Rows of different size, some with outliers."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, cols)) * rng.uniform(0.01, 30, (n, 1))
    rows[::3, ::50] *= 20
    return rows.astype(np.float32)


def assert_close(found: Floats, x: npt.NDArray[np.float64], weights: Floats) -> None:
    """Within what float32 sums may lose of the terms' size."""
    exact = x @ weights.T.astype(np.float64)
    allowed = 2e-6 * (np.abs(x) @ np.abs(weights.T.astype(np.float64))) + 1e-30
    assert np.all(np.abs(found - exact) <= allowed)


@every_format
@pytest.mark.parametrize(("rows", "blocks", "n"), [(8, 1, 1), (20, 3, 5), (125, 2, 31), (67, 9, 9)])
def test_the_product_is_that_of_the_files_numbers(
    kind: TensorType, rows: int, blocks: int, n: int
) -> None:
    cols = columns(kind, blocks)
    raw, x = random_weights(kind, rows, cols), random_rows(n, cols)
    matrix = Matrix(kind, [raw], cols)
    assert_close(matrix(x), as_multiplied(x, matrix.format.activation.name), dequantize(raw, kind))


@every_format
def test_a_column_has_the_same_bits_in_any_company(kind: TensorType) -> None:
    cols = columns(kind, 10)
    matrix = Matrix(kind, [random_weights(kind, 41, cols)], cols)
    x = random_rows(260, cols)
    alone = np.concatenate([matrix(x[i : i + 1]) for i in range(len(x))])
    for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 20, 97, 260):
        assert np.array_equal(matrix(x[:n]), alone[:n]), n
        assert np.array_equal(matrix(x[-n:]), alone[-n:]), n


@every_format
@pytest.mark.parametrize("n", [1, 7, 50])
def test_threads_do_not_change_bits(kind: TensorType, n: int) -> None:
    cols = columns(kind, 4)
    matrix = Matrix(kind, [random_weights(kind, 400, cols)], cols)
    x = random_rows(n, cols)
    one = matrix(x)
    for threads in (2, 3):
        assert np.array_equal(matrix(x, threads), one)


@every_format
def test_experts_multiply_their_own_columns(kind: TensorType) -> None:
    cols, rows = columns(kind, 2), 37
    raws = [random_weights(kind, rows, cols, seed) for seed in range(6)]
    start = np.array([0, 0, 1, 10, 13, 13, 60])
    x = random_rows(60, cols)
    experts = Matrix(kind, raws, cols)
    expected = [
        Matrix(kind, [raw], cols)(x[first:last]) if last > first else x[:0, :rows]
        for raw, first, last in zip(raws, start, start[1:], strict=False)
    ]
    for threads in (1, 3):
        found = experts.multiply(experts.panel(x), 60, start=start, threads=threads)
        assert np.array_equal(found, np.concatenate(expected))


@every_format
@pytest.mark.parametrize("n", [3, 20])
def test_only_the_matrixs_own_rows_are_written(kind: TensorType, n: int) -> None:
    cols, rows = columns(kind, 1), 21
    matrix = Matrix(kind, [random_weights(kind, rows, cols)], cols)
    x = random_rows(n, cols)
    wide = np.full((n, 64), 7.0, np.float32)
    matrix.multiply(matrix.panel(x), n, out=wide[:, 5:])
    assert np.array_equal(wide[:, 5 : 5 + rows], matrix(x))
    assert np.all(wide[:, :5] == 7.0)
    assert np.all(wide[:, 5 + rows :] == 7.0)


@every_format
def test_bias_is_added_last(kind: TensorType) -> None:
    cols, rows = columns(kind, 2), 13
    matrix = Matrix(kind, [random_weights(kind, rows, cols)], cols)
    bias = np.linspace(-3, 3, rows, dtype=np.float32)
    for n in (2, 17):
        x = random_rows(n, cols)
        found = matrix.multiply(matrix.panel(x), n, bias=bias)
        assert np.array_equal(found, matrix(x) + bias)


@pytest.mark.parametrize("n", [1, 3, 30])
@pytest.mark.parametrize("rows", [16, 37])
def test_a_residual_is_added_and_each_eight_rows_tell_their_largest(rows: int, n: int) -> None:
    matrix = Matrix(TensorType.Q8_0, [random_weights(TensorType.Q8_0, rows, 64)], 64)
    x, rng = random_rows(n, 64), np.random.default_rng(1)
    bias = rng.standard_normal(rows).astype(np.float32)
    residual = rng.standard_normal((n, rows + 3)).astype(np.float32)
    maxima = np.zeros((n, -(-rows // 8)), np.float32)
    out = matrix.multiply(matrix.panel(x), n, bias=bias, residual=residual, maxima=maxima)
    assert np.array_equal(out, (matrix(x) + bias) + residual[:, :rows])
    filled = np.pad(out, ((0, 0), (0, -rows % 8)), constant_values=-np.inf)
    assert np.array_equal(maxima, filled.reshape(n, -1, 8).max(axis=2))


def test_the_largest_of_eight_rows_is_nan_if_one_of_them_is() -> None:
    matrix = Matrix(TensorType.Q8_0, [random_weights(TensorType.Q8_0, 24, 32)], 32)
    x, maxima = random_rows(1, 32), np.zeros((1, 3), np.float32)
    bias = np.zeros(24, np.float32)
    bias[11], bias[20] = np.nan, np.inf
    matrix.multiply(matrix.panel(x), 1, bias=bias, maxima=maxima)
    assert np.isfinite(maxima[0, 0])
    assert np.isnan(maxima[0, 1])
    assert np.isposinf(maxima[0, 2])


@every_format
def test_gathered_rows(kind: TensorType) -> None:
    cols = columns(kind, 3)
    matrix = Matrix(kind, [random_weights(kind, 16, cols)], cols)
    x = random_rows(5, cols)
    order = np.array([4, 0, 0, 2, 3, 1, 4], np.int32)
    found = matrix.multiply(matrix.panel(x, 2, order), len(order))
    assert np.array_equal(found, matrix(x)[order])


@every_format
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("byte", [0xFF, 0x80, 0x00])
def test_the_largest_sums_do_not_overflow(kind: TensorType, byte: int, sign: int) -> None:
    """All quants, scales and activations at an end of their range."""
    cols, rows = columns(kind, 2), 8
    raw = extreme_weights(kind, rows, cols, byte)
    x = np.full((10, cols), 3.5 * sign, np.float32)
    matrix = Matrix(kind, [raw], cols)
    weights = dequantize(raw, kind)
    for n in (1, 4, 10):
        assert_close(matrix(x[:n]), as_multiplied(x[:n], matrix.format.activation.name), weights)


@every_format
def test_rows_without_size(kind: TensorType) -> None:
    """Zeros, and numbers too small to be divided by, give finite products."""
    cols = columns(kind, 2)
    matrix = Matrix(kind, [random_weights(kind, 8, cols)], cols)
    assert np.all(matrix(np.zeros((3, cols), np.float32)) == 0)
    assert np.all(np.isfinite(matrix(np.full((3, cols), 1e-40, np.float32))))


@every_format
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kind: TensorType) -> None:
    cols = columns(kind, 2)
    matrix = Matrix(kind, [random_weights(kind, 8, cols)], cols)
    x = random_rows(4, cols)
    good = matrix(x)
    for bad in (np.nan, np.inf):
        x[1, 3], x[3, -1] = bad, -bad
        found = matrix(x)
        assert not np.any(np.isfinite(found[[1, 3]]))
        assert np.array_equal(found[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize(
    "kind", [k for k in FORMATS if k not in SUPER_BLOCKS], ids=lambda k: k.name
)
def test_real_widths_that_are_no_multiple_of_256(kind: TensorType) -> None:
    for cols in (96, 576, 640, 960):
        raw, x = random_weights(kind, 24, cols), random_rows(11, cols)
        matrix = Matrix(kind, [raw], cols)
        expected = as_multiplied(x, matrix.format.activation.name)
        assert_close(matrix(x), expected, dequantize(raw, kind))
        assert_close(matrix(x[:2]), expected[:2], dequantize(raw, kind))
