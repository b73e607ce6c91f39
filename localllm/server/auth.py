"""API keys: who asks, in which traffic class, and how much of it.

A key file is TOML, a `[[key]]` table for each key:

    [[key]]
    name = "alice"                # in no log and no metric, but salts the prefix cache
    key = "a long random text"    # or sha256 = "its hash in hexadecimal"
    class = "interactive"         # optional: see CLASSES
    requests_per_minute = 60      # optional
    max_concurrent = 4            # optional

    [classes]                     # optional: classes of your own, with their priority
    nightly = 30                  # a smaller number goes first
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError

DEFAULT_CLASS = "default"
CLASSES: Mapping[str, int] = {"interactive": 0, DEFAULT_CLASS: 10, "batch": 20}
_NAME = re.compile(r"[\w.-]{1,64}")
_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = frozenset({"name", "key", "sha256", "class", "requests_per_minute", "max_concurrent"})


class KeyFileError(LocalLLMError):
    """A key file that cannot be used; the message names the entry, never a key."""


@dataclass(frozen=True)
class Tenant:
    """Whose requests these are. Prefixes are cached per tenant. A smaller priority goes first."""

    name: str
    traffic_class: str = DEFAULT_CLASS
    priority: int = CLASSES[DEFAULT_CLASS]
    requests_per_minute: int | None = None
    max_concurrent: int | None = None


ANYBODY = Tenant("")
"""Who asks where no keys are."""


class KeyRing:
    """Finds tenants by their keys, of which it holds hashes alone."""

    def __init__(self, keys: Iterable[tuple[bytes, Tenant]] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, key: bytes) -> Tenant | None:
        """Takes the same time whatever the key has in common with known ones."""
        digest = sha256(key).digest()
        found = None
        for known, tenant in self._keys:
            if compare_digest(known, digest):
                found = tenant
        return found


def load_keys(plain: Sequence[str] = (), file: Path | None = None) -> KeyRing:
    """Keys given by themselves (tenants key-1, key-2, ...) and those of a file; LocalLLMError."""
    keys = [(_digest(key), Tenant(f"key-{i}")) for i, key in enumerate(plain, 1)]
    if any(not key.strip() for key in plain):
        raise LocalLLMError("An API key is empty")
    if file is not None:
        keys += _read(file)
    names = [tenant.name for _, tenant in keys]
    if twice := {name for name in names if names.count(name) > 1}:
        raise KeyFileError(f"{file}: two keys have the name {min(twice)!r}")
    if len({digest for digest, _ in keys}) < len(keys):
        raise LocalLLMError("An API key is given twice")
    return KeyRing(keys)


def _read(file: Path) -> list[tuple[bytes, Tenant]]:
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise KeyFileError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise KeyFileError(f"{file}: not TOML: {error}") from error
    if unknown := content.keys() - {"key", "classes"}:
        raise KeyFileError(f"{file}: unknown table {min(unknown)!r}")
    classes = {**CLASSES, **content.get("classes", {})}
    for name, priority in classes.items():
        if not _NAME.fullmatch(name) or not _is_integer(priority):
            raise KeyFileError(f"{file}: the priority of class {name!r} must be an integer")
    entries = content.get("key", [])
    if not isinstance(entries, list) or not entries:
        raise KeyFileError(f"{file}: there is no [[key]] table in it")
    return [_entry(f"{file}: key {i}", entry, classes) for i, entry in enumerate(entries, 1)]


def _entry(
    where: str, entry: Mapping[str, Any], classes: Mapping[str, int]
) -> tuple[bytes, Tenant]:
    if unknown := entry.keys() - _FIELDS:
        raise KeyFileError(f"{where}: unknown field {min(unknown)!r}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeyFileError(f"{where}: name must be 1 to 64 letters, digits, dots or dashes")
    where = f"{where} ({name})"
    traffic_class = entry.get("class", DEFAULT_CLASS)
    if traffic_class not in classes:
        raise KeyFileError(f"{where}: class must be one of {', '.join(classes)}")
    limits = {field: entry.get(field) for field in ("requests_per_minute", "max_concurrent")}
    for field, limit in limits.items():
        if limit is not None and not (_is_integer(limit) and limit > 0):
            raise KeyFileError(f"{where}: {field} must be an integer of 1 or more")
    tenant = Tenant(name, traffic_class, classes[traffic_class], **limits)
    return _secret(where, entry), tenant


def _secret(where: str, entry: Mapping[str, Any]) -> bytes:
    key, digest = entry.get("key"), entry.get("sha256")
    if (key is None) == (digest is None):
        raise KeyFileError(f"{where}: give either key or sha256")
    if key is not None:
        if not isinstance(key, str) or not key.strip():
            raise KeyFileError(f"{where}: key must be a text that is not empty")
        return _digest(key)
    if not isinstance(digest, str) or not _HEX_DIGEST.fullmatch(digest):
        raise KeyFileError(f"{where}: sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
