"""The Metal kernels, compiled as C++ with a small shim, against gguf-py. No Apple GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor  # noqa: E402

from localllm.backends.mps.shaders import COLUMNS, FORMATS, ROWS_PER_GROUP  # noqa: E402
from localllm.backends.mps.shaders.matvec import matvec  # noqa: E402
from localllm.backends.torch_common.weights import Matrix  # noqa: E402
from localllm.gguf import TensorType  # noqa: E402
from localllm.gguf.blocks import block_size  # noqa: E402
from tests.backends.cuda.blocks import dequantized, random_blocks  # noqa: E402
from tests.backends.mps.compiled import CompiledShaders, compiled_shaders  # noqa: E402

pytestmark = pytest.mark.torch

each_format = pytest.mark.parametrize("kind", sorted(FORMATS), ids=lambda kind: kind.name)


@pytest.fixture
def shaders() -> CompiledShaders:
    return compiled_shaders()


def random_matrix(kind: TensorType, rows: int, cols: int, seed: int) -> tuple[Matrix, Tensor]:
    """And its values, as gguf-py reads them."""
    raw = random_blocks(kind, rows, cols, np.random.default_rng(seed))
    values: Tensor = torch.from_numpy(dequantized(kind, raw))
    return Matrix(torch.from_numpy(raw), kind, rows, cols, 0, torch.float32), values


def random_vectors(vectors: int, cols: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((vectors, cols)).astype(np.float32)
    rows: Tensor = torch.from_numpy(values)
    return rows


def product(shaders: CompiledShaders, x: Tensor, weight: Matrix) -> Tensor:
    out: Tensor = torch.full((len(x), weight.rows), torch.nan)
    matvec(shaders, x, weight, out)
    return out


@each_format
@pytest.mark.parametrize(
    ("rows", "blocks", "vectors"), [(1, 1, 1), (5, 5, 3), (4, 37, 1), (9, 2, 8), (6, 3, 17)]
)
def test_products_are_those_of_gguf_py(
    shaders: CompiledShaders, kind: TensorType, rows: int, blocks: int, vectors: int
) -> None:
    """One block; rows and vectors that fill no group; more units than lanes."""
    weight, values = random_matrix(kind, rows, blocks * block_size(kind), seed=5)
    x = random_vectors(vectors, weight.cols, seed=6)
    expected = x.double() @ values.double().T
    most = float(x.abs().max() * values.abs().sum(1).max())
    out = product(shaders, x, weight)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-7 * most)
    assert len(shaders.launches) == 1


@each_format
def test_each_weight_alone(shaders: CompiledShaders, kind: TensorType) -> None:
    """Unit vectors read single weights, to the bit: no error can hide in a sum."""
    weight, values = random_matrix(kind, 3, 2 * block_size(kind), seed=7)
    np.testing.assert_array_equal(product(shaders, torch.eye(weight.cols), weight), values.T)


@each_format
def test_a_vector_has_the_same_bits_in_any_company(
    shaders: CompiledShaders, kind: TensorType
) -> None:
    weight, _ = random_matrix(kind, 6, 512, seed=8)
    x = random_vectors(2 * COLUMNS + 3, 512, seed=9)
    whole = product(shaders, x, weight)
    for part in (slice(2, 3), slice(5, 5 + COLUMNS), slice(7, 18)):
        assert torch.equal(product(shaders, x[part], weight), whole[part])


@pytest.mark.parametrize("rows", [1, ROWS_PER_GROUP + 2, 2 * ROWS_PER_GROUP])
def test_windows_of_wider_rows_are_read_and_written(shaders: CompiledShaders, rows: int) -> None:
    """x and out are columns of more, and the matrix is one of several experts."""
    experts, _ = random_matrix(TensorType.Q6_K, 3 * rows, 256, seed=10)
    experts = Matrix(experts.data, experts.kind, rows, 256, 3, torch.float32)
    x, out = random_vectors(11, 300, seed=11), torch.full((11, rows + 20), 7.0)
    matvec(shaders, x[:, 13:269], experts.expert(1), out[:, 5 : 5 + rows])
    alone = Matrix(experts.data[rows : 2 * rows].clone(), TensorType.Q6_K, rows, 256, 0, x.dtype)
    assert torch.equal(out[:, 5 : 5 + rows], product(shaders, x[:, 13:269].clone(), alone))
    assert (out[:, :5] == 7).all()
    assert (out[:, 5 + rows :] == 7).all()


def test_no_vectors_launch_nothing(shaders: CompiledShaders) -> None:
    weight, _ = random_matrix(TensorType.Q8_0, 4, 64, seed=12)
    assert product(shaders, torch.empty(0, 64), weight).shape == (0, 4)
    assert not shaders.launches


def test_what_the_kernels_cannot_do_is_refused(shaders: CompiledShaders) -> None:
    weight, _ = random_matrix(TensorType.Q8_0, 4, 64, seed=13)
    with pytest.raises(ValueError, match="side by side"):
        product(shaders, torch.ones(64, 2).T, weight)
    for kind, name in ((TensorType.Q5_0, "Q5_0"), (None, "floats")):
        other = Matrix(torch.zeros(4, 44, dtype=torch.uint8), kind, 4, 64, 0, torch.float32)
        with pytest.raises(ValueError, match=f"no Metal kernel for {name}"):
            product(shaders, torch.ones(1, 64), other)
