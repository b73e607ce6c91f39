"""What tests of the engine's process share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from localllm.config import EngineConfig
from localllm.engine.messages import Submit
from localllm.sampling_params import SamplingParams
from tests.helpers import FIXTURES

TINY_MODEL = FIXTURES / "architectures" / "llama-format-q4_0.gguf"
PATIENCE = 60.0  # seconds; a guard against hanging, on a busy machine


def config(model: Path = TINY_MODEL, *, ctx_size: int = 4000) -> EngineConfig:
    """The reference backend: slow enough to be caught in the middle of an answer."""
    return EngineConfig(model=model, backend="reference", ctx_size=ctx_size)


def long_request(name: str, max_tokens: int = 3000) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Submit(name, (1, 2, 3), params, frozenset())


def engine_processes(parent: int | None = None) -> list[psutil.Process]:
    """The engine processes among the children of a process, by default of this one."""
    children = psutil.Process(parent or os.getpid()).children()
    return [child for child in children if "localllm.engine.process" in child.cmdline()]


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
