"""One GGUF file on disk: mapped, walked over and checked."""

from __future__ import annotations

import math
import mmap
import stat
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from localllm.errors import GGUFError
from localllm.gguf.blocks import TensorType, block_size, row_bytes
from localllm.gguf.tensor import Tensor
from localllm.gguf.values import Cursor, Metadata, quoted

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MIN_KEY_BYTES = 13  # name length, type, and a value of one byte
_MIN_TENSOR_BYTES = 32  # name length, number of dimensions, one dimension, type, offset
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class Shard:
    """Parses on construction; raises GGUFError for whatever is wrong with the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = Cursor(self._data, path.name)
        self.version = _read_version(cursor)
        n_tensors = cursor.u64()
        n_keys = cursor.u64()
        if n_keys > cursor.remaining // _MIN_KEY_BYTES:
            cursor.fail(f"a count of {n_keys} keys runs past the end of the file")
        if n_tensors > cursor.remaining // _MIN_TENSOR_BYTES:
            cursor.fail(f"a count of {n_tensors} tensors runs past the end of the file")
        self.metadata = Metadata(self._data, path.name)
        self.metadata.scan(cursor, n_keys)
        self.tensors = self._read_tensors(cursor, n_tensors)
        self._header_bytes = cursor.offset

    @property
    def header(self) -> bytes:
        """All that comes before the tensors' data."""
        return self._data[: self._header_bytes]

    @property
    def n_bytes(self) -> int:
        """Of the file."""
        return len(self._data)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last array that still shows it."""
        with suppress(BufferError):
            self._data.close()

    def _read_tensors(self, cursor: Cursor, count: int) -> dict[str, Tensor]:
        alignment = self._alignment(cursor)
        tensors: dict[str, Tensor] = {}
        starts: list[tuple[int, Tensor]] = []
        infos = [_read_tensor_info(cursor, index, count) for index in range(count)]
        data_start = -(-cursor.offset // alignment) * alignment
        for name, tensor_type, shape, offset in infos:
            cursor.subject = f"tensor {quoted(name)}"
            if name in tensors:
                cursor.fail("the name occurs twice")
            if offset % alignment:
                cursor.fail(f"its offset {offset} is not a multiple of {alignment}")
            n_bytes = math.prod(shape[:-1]) * row_bytes(tensor_type, shape[-1])
            if data_start + offset + n_bytes > len(self._data):
                cursor.fail("its data runs past the end of the file")
            tensor = Tensor(name, tensor_type, shape, n_bytes, self._data, data_start + offset)
            tensors[name] = tensor
            starts.append((offset, tensor))
        starts.sort(key=lambda item: item[0])
        for (start, tensor), (following, other) in pairwise(starts):
            if start + tensor.n_bytes > following:
                cursor.subject = f"tensor {quoted(other.name)}"
                cursor.fail(f"its data overlaps that of {quoted(tensor.name)}")
        return tensors

    def _alignment(self, cursor: Cursor) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        cursor.subject = "key 'general.alignment'"
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            cursor.fail("it is not a power of two of at least 8")
        return alignment


def _map(path: Path) -> mmap.mmap:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise GGUFError(f"{path}: not a regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GGUFError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # mmap's word for an empty file
        raise GGUFError(f"{path}: the file is empty") from error


def _read_version(cursor: Cursor) -> int:
    magic = cursor.data[:4]
    if magic not in (_MAGIC, _MAGIC[::-1]):
        cursor.fail("not a GGUF file (it does not start with 'GGUF')")
    cursor.skip(4)
    version = cursor.u32()
    if magic != _MAGIC or (version and version % 65536 == 0):
        cursor.fail("big-endian GGUF files are not supported; convert it to little-endian")
    if version not in _VERSIONS:
        cursor.fail(f"GGUF version {version} is not supported (only 2 and 3)")
    return version


def _read_tensor_info(
    cursor: Cursor, index: int, count: int
) -> tuple[str, TensorType, tuple[int, ...], int]:
    cursor.subject = f"tensor {index + 1} of {count}"
    name = cursor.string()
    cursor.subject = f"tensor {quoted(name)}"
    n_dims = cursor.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        cursor.fail(f"it has {n_dims} dimensions instead of 1 to {_MAX_DIMS}")
    shape = tuple(cursor.u64() for _ in range(n_dims))[::-1]
    if 0 in shape:
        cursor.fail(f"a dimension is zero in {list(shape)}")
    number = cursor.u32()
    try:
        tensor_type = TensorType(number)
    except ValueError:
        cursor.fail(f"unknown tensor type {number}")
    if shape[-1] % block_size(tensor_type):
        cursor.fail(
            f"rows of {shape[-1]} are not a multiple of {tensor_type.name}'s block of "
            f"{block_size(tensor_type)}"
        )
    return name, tensor_type, shape, cursor.u64()
