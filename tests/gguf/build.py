"""Writes GGUF files field by field, so that a test can get any of them wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

SCALARS = {
    U8: "<B",
    I8: "<b",
    U16: "<H",
    I16: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
    I64: "<q",
    F64: "<d",
}


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def number(value_type: int, value: float) -> bytes:
    return struct.pack(SCALARS[value_type], value)


def array(element_type: int, elements: Sequence[bytes], count: int | None = None) -> bytes:
    length = len(elements) if count is None else count
    return struct.pack("<IQ", element_type, length) + b"".join(elements)


def key(name: str | bytes, value_type: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + value


@dataclass(frozen=True)
class TensorInfo:
    """`dims` as in the file: the length of a row first."""

    name: str | bytes = "t"
    dims: tuple[int, ...] = (8,)
    type: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        dims = b"".join(struct.pack("<Q", dim) for dim in self.dims)
        return (
            text(self.name)
            + struct.pack("<I", len(self.dims))
            + dims
            + struct.pack("<IQ", self.type, self.offset)
        )


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[TensorInfo] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head += b"".join(keys) + b"".join(info.encode() for info in tensors)
    return head + b"\0" * (-len(head) % alignment) + data
