"""Argument blocks as dataclasses: the fields, in order, are a kernel's own words.

Words 0 and 1 (step header, claim counter) belong to the caller; addresses are in bytes, strides
of float32 matrices in elements.
"""

from __future__ import annotations

import dataclasses
import struct

FIRST_WORD = 2


class Arguments:
    """Base of the frozen dataclasses that describe kernels' own words."""

    def words(self) -> list[int]:
        """Words 2, 3, ... of the block; a float is stored as a float32 in the low half."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return [_float_word(v) if isinstance(v, float) else int(v) for v in values]


def _float_word(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
