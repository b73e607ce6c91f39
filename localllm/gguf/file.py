"""A model as the rest of localllm sees it: one set of keys and tensors, however many files."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from localllm.errors import GGUFError
from localllm.gguf.shard import Shard
from localllm.gguf.tensor import Tensor
from localllm.gguf.values import Value

_D = TypeVar("_D")
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Required:
    """Stands for "no default": the key has to be there."""


_REQUIRED: Final = _Required()


class GGUFFile:
    """A mapped model file, or the set of its shards. Made by `open`; a context manager.

    Values and tensor data are read when asked for. After `close` neither may be asked for, but
    arrays handed out before stay valid.
    """

    def __init__(self, path: Path, shards: list[Shard]) -> None:
        self.path = path
        self._shards = shards
        self._tensors: dict[str, Tensor] = {}
        for shard in shards:
            for name, tensor in shard.tensors.items():
                if name in self._tensors:
                    raise GGUFError(f"{shard.path.name}: tensor {name!r}: another shard has it too")
                self._tensors[name] = tensor
        self._check_tensor_count()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a model by its file or by any of its shards; GGUFError if anything is wrong."""
        path = Path(path)
        opened = Shard(path)
        shards = [opened]
        try:
            names = _shard_paths(opened)
            if len(names) > 1:
                shards = [opened if name == path else Shard(name) for name in names]
                _check_numbering(shards)
            return cls(path, shards)
        except BaseException:
            for shard in shards:
                shard.close()
            raise

    @property
    def shards(self) -> list[Path]:
        return [shard.path for shard in self._shards]

    @property
    def version(self) -> int:
        return self._shards[0].version

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._shards[0].metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    @property
    def architecture(self) -> str:
        return self.get_str("general.architecture")

    def fingerprint(self) -> str:
        """Tells models apart by their keys, tensors (names, types, shapes) and files' sizes.

        No weight is read: models that differ in these alone have the same.
        """
        digest = sha256()
        for shard in self._shards:
            header = shard.header
            digest.update(struct.pack("<QQ", len(header), shard.n_bytes))
            digest.update(header)
        return digest.hexdigest()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: _D) -> int | _D: ...
    def get_int(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda value: type(value) is int, "an integer")

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: _D) -> float | _D: ...
    def get_float(self, key: str, default: Any = _REQUIRED) -> Any:
        """Takes integers too."""
        value = self._get(key, default, lambda value: type(value) in (int, float), "a number")
        return float(value) if type(value) is int else value

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: _D) -> str | _D: ...
    def get_str(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda value: type(value) is str, "a string")

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: _D) -> bool | _D: ...
    def get_bool(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda value: type(value) is bool, "a bool")

    @overload
    def get_array(self, key: str) -> npt.NDArray[Any]: ...
    @overload
    def get_array(self, key: str, default: _D) -> npt.NDArray[Any] | _D: ...
    def get_array(self, key: str, default: Any = _REQUIRED) -> Any:
        """An array of numbers or bools, in the file's own type; read-only."""
        return self._get(
            key, default, lambda value: isinstance(value, np.ndarray), "an array of numbers"
        )

    @overload
    def get_strings(self, key: str) -> list[str]: ...
    @overload
    def get_strings(self, key: str, default: _D) -> list[str] | _D: ...
    def get_strings(self, key: str, default: Any = _REQUIRED) -> Any:
        """An array of strings; the same list each time, so not to be changed."""
        return self._get(key, default, _is_string_list, "an array of strings")

    def _get(
        self, key: str, default: Any, accepts: Callable[[Value], bool], expected: str
    ) -> Value | Any:
        if key not in self.metadata:
            if default is _REQUIRED:
                raise GGUFError(f"{self.path.name}: key {key!r} is missing")
            return default
        value = self.metadata[key]
        if not accepts(value):
            raise GGUFError(f"{self.path.name}: key {key!r} is not {expected}")
        return value

    def _check_tensor_count(self) -> None:
        found = len(self._tensors)
        expected = _split_key(self._shards[0], "split.tensors.count", found)
        if len(self._shards) > 1 and expected != found:
            raise GGUFError(
                f"{self.path.name}: key 'split.tensors.count' says {expected} tensors, "
                f"the shards have {found}"
            )


def _is_string_list(value: Value) -> bool:
    return isinstance(value, list) and all(type(element) is str for element in value)


def _shard_paths(shard: Shard) -> list[Path]:
    """All files of the set that `shard` belongs to, in order."""
    count = _split_key(shard, "split.count", 1)
    if count in (0, 1):
        return [shard.path]
    match = _SHARD_NAME.fullmatch(shard.path.name)
    if not match or int(match["count"]) != count:
        raise GGUFError(
            f"{shard.path.name}: key 'split.count' says {count} shards, but the file's name does "
            "not tell those of the others (NAME-00001-of-00002.gguf)"
        )
    paths = [
        shard.path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, int(match["count"]) + 1)
    ]
    for path in paths:
        if not path.exists():
            raise GGUFError(f"{shard.path.name}: the shard {path.name} is missing")
    return paths


def _check_numbering(shards: list[Shard]) -> None:
    for number, shard in enumerate(shards):
        for key, expected in (("split.no", number), ("split.count", len(shards))):
            found = _split_key(shard, key)
            if found != expected:
                raise GGUFError(
                    f"{shard.path.name}: key {key!r} is {found} where {expected} was expected"
                )


def _split_key(shard: Shard, key: str, default: int | None = None) -> int:
    value = shard.metadata.get(key, default)
    if value is None:
        raise GGUFError(f"{shard.path.name}: key {key!r} is missing")
    if not isinstance(value, int):
        raise GGUFError(f"{shard.path.name}: key {key!r} is not an integer")
    return value
