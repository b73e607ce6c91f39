"""What computes, and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A device and how matrices are multiplied on it.

    Values between operations are float32. `dtype` is what both sides of a matrix product are kept
    in, and the KV cache where it is not `quantized_kv` (q8_0). Products are computed for
    `tile_rows` rows at a time, always: a library's product sums in another order for another
    number of rows, and answers must not depend on it.
    """

    device: torch.device
    dtype: torch.dtype
    tile_rows: int
    quantized_kv: bool = False

    @property
    def precise(self) -> torch.device:
        """Where float64 is computed: Apple's GPUs have none."""
        return torch.device("cpu") if self.device.type == "mps" else self.device


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
