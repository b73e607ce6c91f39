"""Apple GPUs: torch with Metal kernels. Not yet run on Apple hardware."""
