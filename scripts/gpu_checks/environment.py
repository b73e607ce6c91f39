"""What the machine is, and what its GPU can do at best."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu_checks.check import Check
from gpu_checks.timing import seconds
from localllm.backends.torch_common.devices import trouble_with

COPIED = 4 << 30  # bytes
SIDE = 8192  # of the matrices
REHEARSED_COPIED, REHEARSED_SIDE = 1 << 20, 64


def run(check: Check) -> None:
    check.put("python", platform.python_version())
    check.put("packages", {name: _version(name) for name in ("torch", "triton", "numpy")})
    check.put("cores", os.cpu_count())
    if check.device == "cuda":
        if trouble := trouble_with("cuda"):
            check.put("trouble", trouble)
            return
        device = torch.cuda.get_device_properties(0)
        check.put("cuda", torch.version.cuda)
        check.put("gpu", device.name)
        check.put("memory", device.total_memory)
        check.put("capability", f"{device.major}.{device.minor}")
        check.put("multiprocessors", device.multi_processor_count)
        check.put("copy_bytes_per_second", copy_rate(check, COPIED))
        check.put("bf16_matmul_flops", matmul_rate(check, SIDE, torch.bfloat16))
    else:
        check.put("copy_bytes_per_second", copy_rate(check, REHEARSED_COPIED))
        check.put("bf16_matmul_flops", matmul_rate(check, REHEARSED_SIDE, torch.float32))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def copy_rate(check: Check, n_bytes: int) -> float | None:
    """Bytes read and bytes written, together, in a second."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    each = seconds(lambda: target.copy_(source), check.device, calls=10, tries=5)
    return check.measured(2 * n_bytes / each)


def matmul_rate(check: Check, side: int, dtype: torch.dtype) -> float | None:
    """Of two square matrices of normal numbers by the library, which is cuBLAS."""
    a, b = (torch.randn(side, side, device=check.device, dtype=dtype) for _ in "ab")
    out = torch.empty_like(a)
    each = seconds(lambda: torch.mm(a, b, out=out), check.device, calls=10, tries=5)
    return check.measured(2 * side**3 / each)
