"""Triton kernels on CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported

HAVE_TRITON = find_spec("torch") is not None and find_spec("triton") is not None
collect_ignore_glob = [] if HAVE_TRITON else ["test_*.py"]

K_STEP = 16  # of a tensor core's instruction


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(autouse=True)
def _dot_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` as a tensor core does it: along K in steps, products not rounded to 16 bits.

    The interpreter's own goes through BLAS, whose order depends on the operands' shapes, and takes
    bfloat16 for the integers that hold its bits.
    """
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        left, right, total = _float32(a), _float32(b), d.data.copy()
        for k in range(0, left.shape[1], K_STEP):
            products = left[:, k : k + K_STEP, None] * right[None, k : k + K_STEP]
            total += products.sum(axis=1, dtype=np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _launch_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each launch the interpreter looks up what to replace in Triton's language: it is always
    the same, and took a third of the time."""
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):  # else a launch is at work already
                interpreter._patch_attr(package, name, member, builder, scope)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)


def _float32(operand: Any) -> npt.NDArray[np.float32]:
    if str(operand.dtype.scalar) == "bf16":
        values: npt.NDArray[np.float32] = (operand.data.astype(np.uint32) << 16).view(np.float32)
    else:
        values = operand.data.astype(np.float32)
    return values
