"""Which devices torch can compute on here."""

from __future__ import annotations

import torch


def trouble_with(device: str) -> str | None:
    """Why torch cannot compute on "cpu", "cuda" or "mps", or None when it can."""
    match device:
        case "cuda" if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        case "cuda" if not torch.cuda.is_available():
            return "torch finds no NVIDIA GPU or driver"
        case "mps" if not torch.backends.mps.is_built():
            return f"torch {torch.__version__} is built without MPS"
        case "mps" if not torch.backends.mps.is_available():
            return "torch finds no Apple GPU that it can use"
    return None


def gpu_count() -> int:
    """NVIDIA GPUs that torch can compute on."""
    return torch.cuda.device_count() if torch.version.cuda is not None else 0
