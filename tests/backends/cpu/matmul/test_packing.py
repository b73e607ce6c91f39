"""Packing, the rows that embeddings read back, and conversion of other formats."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from localllm.backends.cpu.kernel import H_IDS
from localllm.backends.cpu.lower_linear import EmbedArgs
from localllm.backends.cpu.matmul import FORMATS, convert, storage_type
from localllm.gguf import TensorType
from tests.backends.cpu.kernels.harness import Header, address, aligned, run
from tests.backends.cpu.matmul.products import (
    FLOATS,
    Floats,
    Matrix,
    dequantize,
    random_weights,
    scale_offsets,
    step_of_k,
)

every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)


def embed(matrix: Matrix, ids: npt.NDArray[np.int32], threads: int = 1) -> Floats:
    out = np.full((len(ids), matrix.cols), np.nan, np.float32)
    arguments = EmbedArgs(
        address(out), matrix.cols, address(matrix.packed), matrix.rows, matrix.cols
    )
    header = Header(tokens=len(ids))
    header.words[H_IDS] = address(ids)
    run(matrix.format.embed, arguments, header, threads)
    return out


@every_format
def test_embedded_rows_are_the_files_numbers(kind: TensorType) -> None:
    rows, cols = 45, 300 if kind in FLOATS else 3 * step_of_k(kind)
    raw = random_weights(kind, rows, cols)
    ids = np.array([44, 0, 7, 8, 7, *range(rows)], np.int32)
    found = embed(Matrix(kind, [raw], cols), ids, 2)
    assert np.array_equal(found, dequantize(raw, kind)[ids])


@every_format
def test_scales_at_the_ends_of_their_range(kind: TensorType) -> None:
    cols = 2 * step_of_k(kind)
    raw = random_weights(kind, 7 * 8, cols)
    blocks = raw.reshape(7, 8, cols // step_of_k(kind), -1)
    for at in scale_offsets(kind) if kind not in FLOATS else ():
        ends = np.array([65504, -65504, 6e-8, -6e-5, 0, np.inf, np.nan], np.float16)
        blocks[..., at : at + 2] = ends.view(np.uint8).reshape(7, 1, 1, 2)
    with np.errstate(invalid="ignore"):
        expected = dequantize(raw, kind)
    found = embed(Matrix(kind, [raw], cols), np.arange(56, dtype=np.int32))
    assert np.array_equal(found, expected, equal_nan=True)


def test_every_exponent_of_mxfp4() -> None:
    raw = random_weights(TensorType.MXFP4, 256, 64)
    raw.reshape(256, 2, -1)[..., 0] = np.arange(256)[:, np.newaxis]
    matrix = Matrix(TensorType.MXFP4, [raw], 64)
    with np.errstate(over="ignore"):
        expected = dequantize(raw, TensorType.MXFP4)
        products = 127 * expected[:, [5, 40]].T
    assert np.array_equal(embed(matrix, np.arange(256, dtype=np.int32)), expected)
    x = np.zeros((2, 64), np.float32)
    x[0, 5] = x[1, 40] = 127  # whose scale is 1
    for n in (1, 2, 12):
        found = matrix(np.resize(x, (n, 64)))
        assert np.array_equal(found, np.resize(products, (n, 256)))


def test_an_unknown_id_reads_nothing() -> None:
    raw = random_weights(TensorType.F32, 9, 32)
    found = embed(Matrix(TensorType.F32, [raw], 32), np.array([-1, 9, 8], np.int32))
    assert np.all(found[:2] == 0)
    assert np.array_equal(found[2:], dequantize(raw[8:], TensorType.F32))


@every_format
def test_row_blocks_are_packed_in_any_order_by_any_thread(kind: TensorType) -> None:
    rows, cols = 77, 2 * step_of_k(kind) if kind not in FLOATS else 70
    raw, form = random_weights(kind, rows, cols), FORMATS[kind]
    whole, parts = (aligned(form.packed_bytes(rows, cols)) for _ in range(2))
    form.pack(raw, rows, cols, whole, 0, 10)
    parts[:] = 0xEE
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: form.pack(raw, rows, cols, parts, i, i + 1), reversed(range(10))))
    assert np.array_equal(whole, parts)


@every_format
def test_a_packed_matrix_has_the_files_size(kind: TensorType) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    cols = 512
    assert FORMATS[kind].packed_bytes(16, cols) == 16 * cols // block * size


CONVERTED = [
    kind
    for kind in TensorType
    if kind not in FORMATS and GGMLQuantizationType(kind) in quants._type_traits
]


@pytest.mark.parametrize("kind", CONVERTED, ids=lambda kind: kind.name)
def test_conversion_loses_nothing_visible(kind: TensorType) -> None:
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (500, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32)
    plain = np.all(np.isfinite(values), axis=1) & (np.abs(values).max(axis=1) < 1e4)
    values = values[plain & (np.abs(values).max(axis=1) > 1e-2)]
    assert len(values) > 20
    target = storage_type(kind)
    again = dequantize(convert(values, target), target)
    error = np.square(again - values).sum() / np.square(values).sum()
    assert error < 4e-5, error


def test_every_type_is_stored_somehow() -> None:
    for kind in TensorType:
        assert storage_type(kind) in FORMATS
    assert storage_type(TensorType.F64) == TensorType.F32
    assert storage_type(TensorType.Q4_K) == TensorType.Q4_K
