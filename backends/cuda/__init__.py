"""NVIDIA GPUs: torch with Triton kernels."""
