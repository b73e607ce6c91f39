"""Metadata of a model family, read with the checks that later arithmetic relies on."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile

MAX_COUNT = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class Keys:
    """Reads `{architecture}.*`. Every refusal is a GGUFError that names the key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._prefix = file.architecture + "."

    def has(self, name: str) -> bool:
        return self._prefix + name in self._file.metadata

    def count(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer from `low` to 2**31 - 1; required when there is no default."""
        key = self._prefix + name
        value = self._file.get_int(key) if default is None else self._file.get_int(key, default)
        if not low <= value <= MAX_COUNT:
            self.refuse(name, f"is {value}, expected {low} to {MAX_COUNT}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number that float32 can hold; required when there is no default."""
        key = self._prefix + name
        value = self._file.get_float(key) if default is None else self._file.get_float(key, default)
        if not abs(value) <= _FLOAT32_MAX:  # also catches NaN
            self.refuse(name, f"is {value}, expected a finite float32")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """The same, above zero."""
        value = self.number(name, default)
        if value < _FLOAT32_TINY:
            self.refuse(name, f"is {value:g}, expected more than 0")
        return value

    def not_negative(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value < 0:
            self.refuse(name, f"is {value:g}, expected 0 or more")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self._file.get_bool(self._prefix + name, default)

    def text(self, name: str, default: str) -> str:
        return self._file.get_str(self._prefix + name, default)

    def layer_flags(self, name: str, layers: int) -> list[bool] | None:
        """One flag a layer, or None where the file has no such array."""
        key = self._prefix + name
        if not self.has(name) or isinstance(self._file.metadata[key], int):
            return None
        values = self._file.get_array(key)
        if len(values) < layers:
            self.refuse(name, f"has {len(values)} entries for {layers} layers")
        return [bool(value) for value in values[:layers]]

    def integers(self, name: str) -> list[int]:
        """An array of integers, empty where the file has none."""
        key = self._prefix + name
        if not self.has(name):
            return []
        values = self._file.get_array(key)
        if not np.issubdtype(values.dtype, np.integer):
            self.refuse(name, "is not an array of integers")
        return [int(value) for value in values]

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise GGUFError(f"{self._file.path.name}: key {self._prefix + name!r} {problem}")
