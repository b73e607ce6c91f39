"""Which backend computes, and why: as asked, or the best that the machine has."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import platform
import sys
from dataclasses import dataclass

from localllm.backends.base import Backend
from localllm.config import EngineConfig
from localllm.errors import RequestError

TORCH_IS_MISSING = "torch is not installed: pip install localllm[torch]"

WITHOUT_TRITON = "Triton is not installed, so torch's own operations"

# Where bfloat16 is as good as native; the CPU computes float32 faster.
_DTYPES = {"cuda": "bfloat16", "mps": "bfloat16", "cpu": "float32"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """`why` is empty where the caller left nothing to decide."""

    backend: Backend
    why: str


def select(config: EngineConfig) -> Selection:
    """Imports only what is chosen. RequestError where what is asked for is not there."""
    if config.backend == "reference":
        _refuse_kv_cache_dtype(config, "reference")
        from localllm.backends.reference import ReferenceBackend

        return Selection(ReferenceBackend(), "")
    if config.backend not in ("auto", "cpu", "torch"):
        raise RequestError(f"unknown backend {config.backend!r}", param="backend")
    device, why = config.device, ""
    if config.backend == "cpu":
        device = "cpu"
    elif config.ranks > 1:
        device = "cuda" if config.device == "auto" else config.device
    elif device == "auto":
        device, why = _best_device(config.backend)
        _log.info("device %s: %s", device, why)
    if config.fast and device != "cuda":
        raise RequestError(f"fast is an option of the device cuda; {why}", param="fast")
    if device == "cuda" and not _has_triton():
        why = "; ".join(filter(None, (why, WITHOUT_TRITON)))
        _log.warning("device cuda: %s", WITHOUT_TRITON)
    if config.ranks > 1:
        return Selection(_ranks(config, device), why)
    if config.backend == "torch" or device != "cpu":
        return Selection(torch_backend(config, device), why)
    _refuse_kv_cache_dtype(config, "cpu")
    from localllm.backends.cpu.backend import CpuBackend

    return Selection(CpuBackend(config.threads, config.isa), why)


def _refuse_kv_cache_dtype(config: EngineConfig, backend: str) -> None:
    """For a backend that keeps keys and values in one way only."""
    if config.kv_cache_dtype != "auto":
        raise RequestError(
            f"the {backend} backend has no KV cache in {config.kv_cache_dtype}; torch has",
            param="kv_cache_dtype",
        )


def _ranks(config: EngineConfig, device: str) -> Backend:
    from localllm.backends.parallel.torchrun import Torchrun

    if not _has_torch():
        raise RequestError(f"ranks need it, but {TORCH_IS_MISSING}", param="backend")
    torchrun = Torchrun.find(config)
    needed = config.ranks if torchrun is None else torchrun.local_ranks
    if device == "cuda" and (found := _gpu_count()) < needed:
        trouble = _trouble_with("cuda") or f"this machine has {found}"
        raise RequestError(
            f"{needed} ranks need as many NVIDIA GPUs: {trouble}. With the device cpu they compute "
            "on the CPU",
            param="device",
        )
    from localllm.backends.parallel.spawn import start_ranks

    links = [] if torchrun else start_ranks(config.ranks)
    from localllm.backends.parallel.backend import ParallelBackend  # slow, while the others start

    return ParallelBackend.lead(config, device, links, torchrun)


def torch_backend(
    config: EngineConfig, device: str, *, index: int | None = None, threads: int | None = None
) -> Backend:
    """`index`: of the GPU, where there are several; `threads`: those of one rank of several."""
    if not _has_torch():
        raise RequestError(f"the {device} device needs it, but {TORCH_IS_MISSING}", param="backend")
    if (trouble := _trouble_with(device)) is not None:
        raise RequestError(f"there is no device {device}: {trouble}", param="device")
    dtype = _DTYPES[device] if config.dtype == "auto" else config.dtype
    threads = threads or config.threads
    place = device if index is None else f"{device}:{index}"
    if device == "mps":
        from localllm.backends.mps.backend import MpsBackend

        return MpsBackend(dtype, threads, kv_cache_dtype=config.kv_cache_dtype)
    if device == "cuda" and _has_triton():
        from localllm.backends.cuda.backend import CudaBackend

        return CudaBackend(dtype, place, config.fast, config.kv_cache_dtype)
    from localllm.backends.torch_common.backend import TorchBackend

    return TorchBackend(place, dtype, threads, kv_cache_dtype=config.kv_cache_dtype)


def _best_device(backend: str) -> tuple[str, str]:
    """CUDA before MPS before the CPU, and why.

    torch takes seconds to import, so without it the machine is asked first whether it has a GPU.
    """
    for device, name, present in (
        ("cuda", "NVIDIA GPU", _has_nvidia_gpu()),
        ("mps", "Apple GPU", _has_apple_gpu()),
    ):
        if not present:
            continue
        trouble = _trouble_with(device) if _has_torch() else TORCH_IS_MISSING
        if trouble is None:
            return device, f"this machine has an {name}"
        return "cpu", f"the {name} of this machine is not used, {trouble}"
    kind = "torch on the CPU" if backend == "torch" else "the CPU's own kernels"
    return "cpu", f"no NVIDIA or Apple GPU was found, so {kind}"


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _gpu_count() -> int:
    from localllm.backends.torch_common.devices import gpu_count

    return gpu_count()


def _trouble_with(device: str) -> str | None:
    """Why torch cannot compute on a device, or None when it can."""
    from localllm.backends.torch_common.devices import trouble_with

    return trouble_with(device)


def _has_nvidia_gpu() -> bool:
    """Asks the driver's own library."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def _has_apple_gpu() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
