"""Where the tests of whole programs run: in Triton's interpreter, and on a GPU that is there."""

from __future__ import annotations

import os

import pytest
import torch
from _pytest.mark.structures import ParameterSet


def _trouble() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "kernels are interpreted: set TRITON_INTERPRET=0 and select -m gpu"
    return None


_TROUBLE = _trouble()
_MARKS = [pytest.mark.gpu, pytest.mark.skipif(_TROUBLE is not None, reason=_TROUBLE or "")]
DEVICES = ["cpu", pytest.param("cuda", marks=_MARKS)]


def on_gpu(*values: object) -> ParameterSet:
    """Parameters of a test that needs a GPU."""
    return pytest.param(*values, marks=_MARKS)
