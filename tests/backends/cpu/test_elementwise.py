from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.cpu.kernel import ROWS_LOGITS, ROWS_TOKENS, Kernel
from localllm.backends.cpu.kernels import elementwise
from localllm.backends.cpu.kernels.elementwise import ElementwiseArgs

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ACTIVATIONS: dict[str, Callable[[Doubles], Doubles]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def values(rows: int, width: int, seed: int = 0) -> Floats:
    """A window of `width` columns at an odd offset of a wider matrix."""
    wide = np.random.default_rng(seed).normal(0, 3, (rows, width + 11)).astype(np.float32)
    return wide[:, 3 : 3 + width]


def run(
    run_kernel: Callable[..., None],
    kernel: Kernel,
    x: Floats,
    y: Floats | None = None,
    factor: float = 0.0,
    threads: int = 1,
    rows: int = ROWS_TOKENS,
) -> Floats:
    """Also asserts that columns beside the output's window are left alone."""
    out = np.full((x.shape[0], x.shape[1] + 8), 7.0, np.float32)
    arguments = ElementwiseArgs(
        out.ctypes.data,
        out.shape[1],
        rows,
        x.shape[1],
        x.ctypes.data,
        x.strides[0] // 4,
        0 if y is None else y.ctypes.data,
        0 if y is None else y.strides[0] // 4,
        factor,
    )
    logit_rows = np.zeros(x.shape[0] if rows == ROWS_LOGITS else 0, np.int32)
    tokens = x.shape[0] if rows == ROWS_TOKENS else 1
    run_kernel(kernel, arguments, tokens=tokens, logit_rows=logit_rows, threads=threads)
    assert (out[:, x.shape[1] :] == 7.0).all()
    return out[:, : x.shape[1]]


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 13), (2, 4100), (70, 64)])
@pytest.mark.parametrize("threads", [1, 2])
def test_add_and_scale_are_exact(
    run_kernel: Callable[..., None], shape: tuple[int, int], threads: int
) -> None:
    x, y = values(*shape), values(*shape, seed=1)
    assert np.array_equal(run(run_kernel, elementwise.add(), x, y, threads=threads), x + y)
    scaled = run(run_kernel, elementwise.scale(), x, factor=0.3, threads=threads)
    assert np.array_equal(scaled, x * np.float32(0.3))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(run_kernel: Callable[..., None], name: str) -> None:
    wide = np.concatenate([np.linspace(-20, 20, 4001), np.linspace(-0.01, 0.01, 77), [-1e30, 1e30]])
    if name == "relu_squared":
        wide = wide[:-2]
    x = np.ascontiguousarray(wide[None], np.float32)
    with np.errstate(over="ignore"):
        expected = ACTIVATIONS[name](x.astype(np.float64))
    actual = run(run_kernel, elementwise.activation(name), x)
    assert np.allclose(actual, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_act_mul_is_the_activation_times_the_other_operand(
    run_kernel: Callable[..., None], name: str
) -> None:
    gate, up = values(5, 37), values(5, 37, seed=1)
    act = run(run_kernel, elementwise.activation(name), gate)
    assert np.array_equal(run(run_kernel, elementwise.act_mul(name), gate, up), act * up)


def test_softcap_keeps_small_values(run_kernel: Callable[..., None]) -> None:
    x = np.ascontiguousarray(
        np.concatenate([np.linspace(-200, 200, 999), [1e-6, -1e-6, 0.0]])[None], np.float32
    )
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    actual = run(run_kernel, elementwise.softcap(), x, factor=30.0)
    assert np.allclose(actual, expected, rtol=1e-6, atol=0)


def test_logit_rows_are_counted_by_their_own_word(run_kernel: Callable[..., None]) -> None:
    x = values(6, 24)
    assert np.array_equal(run(run_kernel, elementwise.add(), x, x, rows=ROWS_LOGITS), x + x)
