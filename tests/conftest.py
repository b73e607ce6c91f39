"""Fixtures for what a test may need and a machine may lack: it skips with the reason."""

from __future__ import annotations

import os

# The reference backend's small products: threads that spin for each other crawl on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import pytest

from localllm.config import Paths
from localllm.wheel_model import WheelModel
from tests.helpers import FIXTURES, SHARED
from tests.real_models import GEMMA3, SMOLLM2


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Reference data in the tree."""
    return FIXTURES


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data that is too large for the tree."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent (LOCALLLM_SHARED names another place)")
    return SHARED


@pytest.fixture(scope="session")
def conformance(shared: Path) -> Path:
    folder = shared / "conformance"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, the default model."""
    return _real_model(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """gemma-3-270m."""
    return _real_model(GEMMA3)


def _real_model(model: WheelModel) -> Path:
    path = Paths().models / model.file_name
    if not path.is_file():
        pytest.skip(f"{path} is absent (scripts/test fetches it)")
    return path
