"""Memory of the device: how much there is, what a step takes, and what happens when it is short."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from localllm.backends.base import MemoryInfo
from localllm.backends.host_memory import memory_info
from localllm.errors import DeviceOutOfMemoryError, InsufficientMemoryError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")


def device_memory(device: torch.device) -> MemoryInfo:
    """What torch has reserved and does not use counts as available."""
    if device.type != "cuda":
        return memory_info()
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return MemoryInfo(total, free + idle, dedicated=True)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most that `work` reserves at once, beside what is allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def tells_shortage_at_load(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """For what happens before requests: InsufficientMemoryError where memory runs out."""

    @wraps(method)
    def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except (torch.OutOfMemoryError, DeviceOutOfMemoryError) as error:
            text = _one_line(error)
        torch.cuda.empty_cache()
        raise InsufficientMemoryError(f"The GPU's memory does not hold the model: {text}")

    return call


def tells_shortage_at_run_time(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """For methods of a step: DeviceOutOfMemoryError, with everything that it had taken freed."""

    @wraps(method)
    def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            text = _one_line(error)
        # Beyond the handler, since the error's traceback keeps all tensors of the step.
        torch.cuda.empty_cache()
        raise DeviceOutOfMemoryError(text)

    return call


def _one_line(error: Exception) -> str:
    """Of torch's sentences the first three: what was asked for, the device, and what is free."""
    return " ".join(". ".join(str(error).split(". ")[:3]).split())
