"""All formats' kernels, compiled once for all tests."""

from __future__ import annotations

import pytest

from localllm.backends.cpu.compiler import compile_kernels
from localllm.backends.cpu.matmul import FORMATS
from tests.backends.cpu.matmul.products import kernels_of


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    compile_kernels(kernels_of(list(FORMATS)), 2, lambda _: None)
