"""The Metal kernels, compiled as C++ with a small shim, against gguf-py. No Apple GPU is needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localllm.backends.mps.shaders import FORMATS, LANES, ROWS_PER_GROUP, kernel_name, source
from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size
from tests.backends.cuda.blocks import dequantized, random_blocks

SHIM = Path(__file__).parent / "shim"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("metal")
    (folder / "matvec.metal").write_text(source())
    built = folder / "kernels.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror"]
    flags += ["-Wno-attributes", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(
        [compiler, *flags, f"-I{SHIM}", f"-I{folder}", str(SHIM / "launch.cpp"), "-o", str(built)],
        check=True,
        timeout=300,
    )
    return ctypes.CDLL(str(built))


def launch(
    library: ctypes.CDLL, name: str, addresses: list[int], groups: int, vectors: int
) -> None:
    """Runs a kernel over a grid; addresses of weights, x, out and shape."""
    kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    run = library.launch_half if name.endswith("half") else library.launch_float
    run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_uint] * 2
    run.restype = None
    run(kernel, *addresses, groups, vectors)


def matvec(
    library: ctypes.CDLL,
    tensor_type: TensorType,
    raw: npt.NDArray[np.uint8],
    x: npt.NDArray[np.floating],
) -> npt.NDArray[np.floating]:
    """x @ weight.T, in x's type."""
    rows, (vectors, cols) = len(raw), x.shape
    out = np.full((vectors, rows), np.nan, x.dtype)
    shape = np.array([rows, cols, raw.shape[1]], np.int32)
    name = kernel_name(tensor_type, half=x.dtype == np.float16)
    addresses = [array.ctypes.data for array in (raw, x, out, shape)]
    launch(library, name, addresses, -(-rows // ROWS_PER_GROUP), vectors)
    return out


@pytest.mark.parametrize("tensor_type", sorted(FORMATS), ids=lambda t: t.name)
@pytest.mark.parametrize(("rows", "blocks", "vectors"), [(1, 1, 1), (5, 5, 3), (4, 37, 1)])
def test_products_are_those_of_gguf_py(
    library: ctypes.CDLL, tensor_type: TensorType, rows: int, blocks: int, vectors: int
) -> None:
    """One block, rows that fill no group, more units than lanes."""
    rng = np.random.default_rng(5)
    cols = blocks * block_size(tensor_type)
    raw = random_blocks(tensor_type, rows, cols, rng)
    x = rng.standard_normal((vectors, cols)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantized(tensor_type, raw).T.astype(np.float64)
    largest = np.abs(x).max() * np.abs(dequantized(tensor_type, raw)).sum(axis=1).max()
    out = matvec(library, tensor_type, raw, x)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-7 * largest)

    halves = x.astype(np.float16)
    expected = halves.astype(np.float64) @ dequantized(tensor_type, raw).T.astype(np.float64)
    out = matvec(library, tensor_type, raw, halves)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=3e-7 * largest + 1e-4)


@pytest.mark.parametrize("tensor_type", sorted(FORMATS), ids=lambda t: t.name)
def test_each_weight_alone(library: ctypes.CDLL, tensor_type: TensorType) -> None:
    """Unit vectors read single weights: no error can hide in a sum."""
    rng = np.random.default_rng(6)
    size = block_size(tensor_type)
    raw = random_blocks(tensor_type, 2, size, rng)
    out = matvec(library, tensor_type, raw, np.eye(size, dtype=np.float32))
    expected = dequantized(tensor_type, raw).T
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-7 * np.abs(expected).max())


@pytest.mark.parametrize("tensor_type", sorted(FORMATS), ids=lambda t: t.name)
def test_a_vector_has_the_same_bits_in_any_company(
    library: ctypes.CDLL, tensor_type: TensorType
) -> None:
    rng = np.random.default_rng(7)
    raw = random_blocks(tensor_type, 6, 512, rng)
    x = rng.standard_normal((4, 512)).astype(np.float32)
    whole = matvec(library, tensor_type, raw, x)
    np.testing.assert_array_equal(matvec(library, tensor_type, raw, x[2:3]), whole[2:3])


class CompiledShaders:
    """What `torch.mps.compile_shader` returns, over the library for the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        def kernel(*tensors: Any, threads: tuple[int, ...], group_size: tuple[int, ...]) -> None:
            assert group_size == (LANES * ROWS_PER_GROUP, 1, 1)
            assert threads[0] % group_size[0] == 0
            addresses = [tensor.data_ptr() for tensor in tensors]
            launch(self.library, name, addresses, threads[0] // group_size[0], threads[1])

        return kernel


@pytest.mark.parametrize("rows", [1, 6, 8])
def test_the_launcher_covers_all_rows_and_vectors(
    library: ctypes.CDLL, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from localllm.backends.mps.shaders import matvec as launcher

    monkeypatch.setattr(launcher, "_library", lambda: CompiledShaders(library))
    rng = np.random.default_rng(8)
    raw = random_blocks(TensorType.Q4_K, rows, 256, rng)
    weight = launcher.MetalWeight.load(TensorType.Q4_K, torch.from_numpy(raw), rows, 256)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    out = torch.full((3, rows), torch.nan)
    launcher.matvec(torch.from_numpy(x), weight, out)
    np.testing.assert_array_equal(out.numpy(), matvec(library, TensorType.Q4_K, raw, x))
    launcher.matvec(torch.empty(0, 256), weight, torch.empty(0, rows))  # launches nothing


def test_a_format_without_a_kernel_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from localllm.backends.mps.shaders.matvec import MetalWeight

    with pytest.raises(ValueError, match="Q5_0"):
        MetalWeight.load(TensorType.Q5_0, torch.empty(1, 22, dtype=torch.uint8), 1, 32)
