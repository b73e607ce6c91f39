"""The parts of `scripts/gpu_check`."""
