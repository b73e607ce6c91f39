from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.cpu.kernels.norm import NormArgs, norm

Floats = npt.NDArray[np.float32]
EPS = 1e-5


def expected(
    kind: str, x: Floats, group: int, weight: Floats | None, bias: Floats | None
) -> npt.NDArray[np.float64]:
    runs = x.astype(np.float64).reshape(x.shape[0], -1, group)
    if kind == "layer":
        runs = runs - runs.mean(-1, keepdims=True)
    y = runs / np.sqrt((runs**2).mean(-1, keepdims=True) + EPS)
    if weight is not None:
        y = y * (weight if weight.size == group else weight.reshape(-1, group))
    if bias is not None:
        y = y + (bias if bias.size == group else bias.reshape(-1, group))
    return np.asarray(y.reshape(x.shape))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("width", "group", "entries", "has_bias"),
    [(576, 576, 576, False), (37, 37, 37, True), (192, 64, 64, False), (60, 12, 60, True)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_norm(
    run_kernel: Callable[..., None],
    kind: str,
    width: int,
    group: int,
    entries: int,
    has_bias: bool,
    threads: int,
) -> None:
    r = np.random.default_rng(width)
    x = (r.normal(0.5, 2, (9, width + 3))).astype(np.float32)[:, 1 : width + 1]
    weight = r.normal(1, 0.2, entries).astype(np.float32)
    bias = r.normal(0, 1, entries).astype(np.float32) if has_bias else None
    out = np.full((9, width + 5), 7.0, np.float32)
    step = group if entries == width != group else 0
    arguments = NormArgs(
        out=out.ctypes.data,
        out_stride=width + 5,
        rows=0,
        width=width,
        x=x.ctypes.data,
        x_stride=width + 3,
        group=group,
        weight=weight.ctypes.data,
        weight_step=step,
        bias=0 if bias is None else bias.ctypes.data,
        bias_step=step,
        eps=EPS,
    )
    run_kernel(norm(kind, True, has_bias), arguments, tokens=9, threads=threads)
    assert (out[:, width:] == 7.0).all()
    reference = expected(kind, x, group, weight, bias)
    assert np.allclose(out[:, :width], reference, rtol=3e-6, atol=3e-6)


def test_norm_without_weight(run_kernel: Callable[..., None]) -> None:
    x = np.random.default_rng(0).normal(0, 1, (4, 40)).astype(np.float32)
    out = np.zeros_like(x)
    arguments = NormArgs(out.ctypes.data, 40, 0, 40, x.ctypes.data, 40, 40, 0, 0, 0, 0, EPS)
    run_kernel(norm("rms", False, False), arguments, tokens=4)
    assert np.allclose(out, expected("rms", x, 40, None, None), rtol=3e-6, atol=1e-6)
