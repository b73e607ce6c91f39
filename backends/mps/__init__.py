"""Apple GPUs: torch with Metal kernels."""
