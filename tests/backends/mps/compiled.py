"""The Metal kernels compiled as C++, called as those of `torch.mps.compile_shader` are."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.backends.mps.shaders import LANES, ROWS_PER_GROUP, source

_SHIM = Path(__file__).parent / "shim"
_FLAGS = (
    *("-std=c++20", "-O2", "-shared", "-fPIC", "-Wall", "-Werror"),
    *("-Wno-attributes", "-Wno-unknown-pragmas"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=undefined"),
)
_BUFFERS = (torch.uint8, torch.float32, torch.float32)  # weights, x, out
_NUMBERS = 6


class CompiledShaders:
    """A `ShaderLibrary` for tensors on the CPU. Strict where Metal would read anything at all."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launches: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

        def launch(
            *arguments: Tensor | int, threads: tuple[int, ...], group_size: tuple[int, ...]
        ) -> None:
            buffers = [a for a in arguments[:3] if isinstance(a, Tensor)]
            numbers = [a for a in arguments[3:] if isinstance(a, int)]
            assert tuple(b.dtype for b in buffers) == _BUFFERS
            assert len(numbers) == len(arguments) - 3 == _NUMBERS
            assert group_size == (LANES * ROWS_PER_GROUP, 1, 1)
            assert threads[0] % group_size[0] == 0
            assert threads[2] == 1
            self.launches.append(name)
            self._library.launch(
                kernel,
                *(ctypes.c_void_p(b.data_ptr()) for b in buffers),
                (ctypes.c_long * _NUMBERS)(*numbers),
                ctypes.c_uint(threads[0] // group_size[0]),
                ctypes.c_uint(threads[1]),
            )

        return launch


def compiled_shaders() -> CompiledShaders:
    """Skips the test where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return CompiledShaders(_library(compiler))


@cache
def _library(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "matvec.metal").write_text(source())
        built = Path(folder) / "kernels.so"
        includes = (f"-I{_SHIM}", f"-I{folder}")
        command = [compiler, *_FLAGS, *includes, str(_SHIM / "launch.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, timeout=300)
        return ctypes.CDLL(str(built))
