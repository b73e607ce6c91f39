"""Metadata values: a bounded walk over the file, and decoding when a value is asked for."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from localllm.errors import GGUFError

# Numeric arrays are read-only numpy arrays; arrays of strings or of arrays are lists.
Value: TypeAlias = int | float | bool | str | npt.NDArray[Any] | list[Any]

_MAX_ARRAY_DEPTH = 8
_MIN_ARRAY_BYTES = 12  # element type and count


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def quoted(name: str) -> str:
    """A name for an error message; a damaged file may have very long ones."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


class Cursor:
    """Reads the mapped file front to back; no step leaves the file.

    `subject` says in error messages what is being read.
    """

    def __init__(self, data: mmap.mmap, file: str, offset: int = 0, subject: str = "header"):
        self.data = data
        self.file = file
        self.offset = offset
        self.subject = subject

    @property
    def remaining(self) -> int:
        return len(self.data) - self.offset

    def fail(self, problem: str) -> NoReturn:
        raise GGUFError(f"{self.file}: {self.subject}: {problem}")

    def skip(self, n_bytes: int) -> int:
        """Moves on by `n_bytes` and returns where they start."""
        start = self.offset
        if n_bytes > self.remaining:
            self.fail(f"{n_bytes} bytes at offset {start} run past the end of the file")
        self.offset += n_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"the string at offset {start} is not valid UTF-8")

    def value_type(self) -> ValueType:
        number = self.u32()
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"unknown value type {number}")

    def count(self, element_bytes: int) -> int:
        """A number of elements of at least `element_bytes` each, which the file could hold."""
        count = self.u64()
        if count > self.remaining // element_bytes:
            self.fail(f"a count of {count} elements runs past the end of the file")
        return count


def skip_value(cursor: Cursor, value_type: ValueType, depth: int = 0) -> None:
    """Walks over a value, so that its lengths and types are known to be good."""
    if value_type == ValueType.STRING:
        cursor.skip(cursor.u64())
    elif value_type == ValueType.ARRAY:
        _skip_array(cursor, depth + 1)
    else:
        cursor.skip(_DTYPES[value_type].itemsize)


def _skip_array(cursor: Cursor, depth: int) -> None:
    if depth > _MAX_ARRAY_DEPTH:
        cursor.fail(f"arrays are nested more than {_MAX_ARRAY_DEPTH} deep")
    element = cursor.value_type()
    if element == ValueType.STRING:
        _skip_strings(cursor, cursor.count(_U64.size))
    elif element == ValueType.ARRAY:
        for _ in range(cursor.count(_MIN_ARRAY_BYTES)):
            _skip_array(cursor, depth + 1)
    else:
        size = _DTYPES[element].itemsize
        cursor.skip(cursor.count(size) * size)


def _skip_strings(cursor: Cursor, count: int) -> None:
    # A vocabulary has 262,144 of these: the loop leaves bounds to unpack_from and checks the end.
    data, offset, length_at = cursor.data, cursor.offset, _U64.unpack_from
    try:
        for _ in range(count):
            offset += 8 + length_at(data, offset)[0]
    except (struct.error, OverflowError):
        cursor.fail("a string in the array runs past the end of the file")
    cursor.skip(offset - cursor.offset)


def read_value(cursor: Cursor, value_type: ValueType) -> Value:
    """Decodes a value that `skip_value` has walked over."""
    if value_type == ValueType.STRING:
        return cursor.string()
    if value_type == ValueType.ARRAY:
        return _read_array(cursor)
    value = _read_numbers(cursor, value_type, 1)[0].item()
    assert isinstance(value, int | float)
    return value


def _read_array(cursor: Cursor) -> npt.NDArray[Any] | list[Any]:
    element, count = cursor.value_type(), cursor.count(1)
    if element == ValueType.STRING:
        return _read_strings(cursor, count)
    if element == ValueType.ARRAY:
        return [_read_array(cursor) for _ in range(count)]
    return _read_numbers(cursor, element, count)


def _read_strings(cursor: Cursor, count: int) -> list[str]:
    data, offset, length_at = cursor.data, cursor.offset, _U64.unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            strings.append(data[start:offset].decode("utf-8"))
    except UnicodeDecodeError:
        cursor.fail(f"element {len(strings)} is not valid UTF-8")
    cursor.skip(offset - cursor.offset)
    return strings


def _read_numbers(cursor: Cursor, value_type: ValueType, count: int) -> npt.NDArray[Any]:
    dtype = _DTYPES[value_type]
    start = cursor.skip(count * dtype.itemsize)
    numbers = np.frombuffer(cursor.data[start : cursor.offset], dtype)
    if value_type == ValueType.BOOL:
        if np.any(numbers > 1):
            cursor.fail("a bool is neither 0 nor 1")
        return numbers.view(np.bool_)
    return numbers


class Metadata(Mapping[str, Value]):
    """The file's keys in their order; a value is decoded when first asked for, then kept."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self._data = data
        self._file = file
        self._places: dict[str, tuple[ValueType, int]] = {}
        self._values: dict[str, Value] = {}

    def scan(self, cursor: Cursor, count: int) -> None:
        """Finds where each of the next `count` keys has its value."""
        for index in range(count):
            cursor.subject = f"key {index + 1} of {count}"
            key = cursor.string()
            if not key:
                cursor.fail("the name is empty")
            cursor.subject = f"key {quoted(key)}"
            if key in self._places:
                cursor.fail("the key occurs twice")
            value_type = cursor.value_type()
            self._places[key] = (value_type, cursor.offset)
            skip_value(cursor, value_type)

    def __getitem__(self, key: str) -> Value:
        if key not in self._values:
            value_type, offset = self._places[key]
            cursor = Cursor(self._data, self._file, offset, f"key {quoted(key)}")
            self._values[key] = read_value(cursor, value_type)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places  # without decoding, which Mapping's own would do

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
