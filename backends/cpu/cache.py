"""Compiled kernels on disk, one file per kernel.

A file is found by the kernel's own name, so every source that could change its code is part of
the directory's name: all of backends/cpu, the compiler's versions, the processor's features and
the instruction set in use. Two processes that compile the same kernel write the same file, each
by an atomic rename. (Numba's own cache keys on the function's file alone, and its index can pair
a name with another process's data.)
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import shutil
import sys
import tempfile
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from localllm.backends.cpu import target
from localllm.config import Paths

_KEPT_VERSIONS = 3
_directory: Path | None = None
_log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Changes with any source file of this package and with Python's and the compiler's version."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(repr((sys.version, numba.__version__, llvmlite.__version__)).encode())
    return digest.hexdigest()[:16]


def _cpu_key(isa: str) -> str:
    name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(f"{name} {features}".encode()).hexdigest()[:8]
    return f"{name}-{digest}-{isa}"


def directory() -> Path:
    """Where this process keeps its kernels: one directory, as it has one instruction set."""
    return _directory or use_directory(open_directory(target.current()))


def use_directory(path: Path) -> Path:
    """Has all kernels from now on kept there."""
    global _directory
    _directory = path
    return path


def open_directory(isa: str, root: Path | None = None) -> Path:
    """The directory for this source, compiler, processor and instruction set; it can be written.

    Where it cannot (a read-only home), a temporary one that goes away with the process.
    """
    root = root or Paths().kernels
    directory = root / source_digest() / _cpu_key(isa)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory.parent)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        directory = Path(tempfile.mkdtemp(prefix="localllm-kernels-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        _log.warning(
            "cannot write the kernel cache %s (%s); compiling into %s for this run only",
            root,
            error.strerror,
            directory,
        )
        return directory
    _prune(root)
    return directory


def _prune(root: Path) -> None:
    """Drops the least recently used versions; a process that still uses one only recompiles."""

    def last_used(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    versions = sorted((p for p in root.iterdir() if p.is_dir()), key=last_used, reverse=True)
    for stale in versions[_KEPT_VERSIONS:]:
        shutil.rmtree(stale, ignore_errors=True)


class DiskCache(_Cache):
    """Numba's cache interface for one function of one signature, kept in one file."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.nbc"

    @property
    def cache_path(self) -> str:
        return str(self._path.parent)

    def exists(self) -> bool:
        return self._path.is_file()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None when there is none (or a torn, unreadable one)."""
        # All of numba's implementations, which `refresh` would register, take longer to register
        # than kernels to load; compiled code needs no more than the runtime.
        rtsys.initialize(target_context)
        try:
            saved_sig, magic, payload = pickle.loads(self._path.read_bytes())
        except OSError:
            return None
        except (pickle.UnpicklingError, EOFError, ValueError) as error:
            _log.warning("recompiling: cached kernel %s is damaged (%s)", self._path, error)
            return None
        if saved_sig != str(sig) or magic != target_context.codegen().magic_tuple():
            return None
        return CompileResult._rebuild(target_context, *payload)

    def save_overload(self, sig: Any, data: Any) -> None:
        content = dumps((str(sig), data.codegen.magic_tuple(), data._reduce()))
        if data.library.has_dynamic_globals:
            raise TypeError(f"{self._path.stem} refers to addresses of this process")
        temporary = self._path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(self._path)
        except OSError as error:  # a full disk must not stop the kernel from being used
            temporary.unlink(missing_ok=True)
            _log.warning("cannot cache kernel %s (%s)", self._path, error.strerror)

    def enable(self) -> None:
        """Always on; part of numba's interface."""

    def disable(self) -> None:
        """Always on; part of numba's interface."""

    def flush(self) -> None:
        self._path.unlink(missing_ok=True)
