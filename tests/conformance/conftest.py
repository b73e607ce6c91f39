"""The backends that have to agree with llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from localllm.backends.base import Backend

MakeBackend: TypeAlias = Callable[[], Backend]


def _reference() -> Backend:
    from localllm.backends.reference import ReferenceBackend

    return ReferenceBackend()


def _cpu() -> Backend:
    from localllm.backends.cpu.backend import CpuBackend

    return CpuBackend()


BACKENDS: dict[str, MakeBackend] = {"reference": _reference, "cpu": _cpu}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = BACKENDS[request.param]()
    yield made
    made.close()
