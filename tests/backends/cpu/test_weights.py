from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from localllm.backends.cpu import weights as loading
from localllm.backends.cpu.kernel import H_IDS, H_TOKENS, HEADER_WORDS
from localllm.backends.cpu.lower_linear import EmbedArgs
from localllm.backends.cpu.memory import aligned_bytes
from localllm.backends.cpu.tape import SYNC_BYTES
from localllm.backends.cpu.weights import Matrix, Weights
from localllm.backends.cpu.workers import Workers
from localllm.backends.program import FloatArray, Program
from localllm.errors import GGUFError
from localllm.gguf import Tensor, TensorType
from tests.backends.cpu.programs import make_tensor, random_tensors

ROWS, COLS, EXPERTS = 43, 256, 3


def program() -> Program:
    """A tied embedding and experts whose rows do not fill the last block."""
    p = Program(
        {
            "embed.weight": (ROWS, COLS),
            "norm": (COLS,),
            "router.weight": (EXPERTS, COLS),
            "gate.weight": (EXPERTS, ROWS, COLS),
            "up.weight": (EXPERTS, ROWS, COLS),
            "down.weight": (EXPERTS, COLS, 64),
        }
    )
    x = p.norm(p.embed("embed.weight"), "norm", 1e-5)
    logits = p.linear(x, "router.weight", shard="column")
    x = p.moe(x, logits, gate="gate.weight", up="up.weight", down="down.weight", used=2)
    p.finish(p.linear(p.select_rows(x), "embed.weight", shard="vocab"))
    return p


def unpacked(matrix: Matrix, expert: int, pools: dict[int, Workers]) -> FloatArray:
    """The rows of a packed matrix, as the embedding kernel reads them."""
    ids = np.arange(matrix.rows, dtype=np.int32)
    out = np.zeros((matrix.rows, matrix.cols), np.float32)
    header = np.zeros(HEADER_WORDS, np.int64)
    header[H_TOKENS], header[H_IDS] = matrix.rows, ids.ctypes.data
    sync = aligned_bytes(SYNC_BYTES)
    packed = matrix.address + expert * matrix.expert_bytes
    own = EmbedArgs(out.ctypes.data, matrix.cols, packed, matrix.rows, matrix.cols).words()
    block = np.array([header.ctypes.data, sync.ctypes.data, *own], np.int64)
    table = np.array([[matrix.format.embed.address, block.ctypes.data, -1, 0]], np.int64)
    pools[1].start(table, sync, 0, 1, matrix.rows)
    pools[1].join()
    pools[1].settle()
    return out


def load(
    program: Program,
    tensors: Mapping[str, Tensor],
    threads: int = 2,
    lines: list[str] | None = None,
) -> Weights:
    weights = Weights(program, tensors)
    said = list[str]() if lines is None else lines
    weights.pack(threads, said.append)
    return weights


def tensors_of(kind: TensorType) -> Mapping[str, Tensor]:
    return random_tensors(program(), lambda _: kind)


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.Q8_0, TensorType.Q4_1])
@pytest.mark.parametrize("slab_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_packed_matrices_hold_the_files_values(
    pools: dict[int, Workers],
    monkeypatch: pytest.MonkeyPatch,
    kind: TensorType,
    slab_bytes: int,
    threads: int,
) -> None:
    monkeypatch.setattr(loading, "_SLAB_BYTES", slab_bytes)
    tensors = tensors_of(kind)
    weights = load(program(), tensors, threads)
    for name, matrix in weights.matrices.items():
        expected = tensors[name].dequantize().reshape(max(1, matrix.experts), matrix.rows, -1)
        for expert, values in enumerate(expected):
            assert np.array_equal(unpacked(matrix, expert, pools), values), (name, expert)


def test_a_tied_matrix_is_stored_once() -> None:
    weights = load(program(), tensors_of(TensorType.F32))
    assert list(weights.matrices) == [
        "embed.weight",
        "router.weight",
        "gate.weight",
        "up.weight",
        "down.weight",
    ]
    matrices = weights.matrices.values()
    assert weights.n_bytes == sum(m.expert_bytes * max(1, m.experts) for m in matrices) + 4 * COLS
    address, size = weights.vector("norm")
    assert (size, address % 4) == (COLS, 0)
    assert weights.vector(None) == (0, 0)


def test_formats_without_kernels_are_converted_and_said_to_be(pools: dict[int, Workers]) -> None:
    from gguf import GGMLQuantizationType, quants

    p = Program({"embed.weight": (ROWS, COLS)})
    p.finish(p.linear(p.select_rows(p.embed("embed.weight")), "embed.weight", shard="vocab"))
    values = np.random.default_rng(0).normal(size=(ROWS, COLS)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType.TQ1_0)
    tensor = make_tensor("embed.weight", TensorType.TQ1_0, values)
    lines: list[str] = []
    weights = load(p, {"embed.weight": tensor}, lines=lines)
    assert lines[0] == "embed.weight: TQ1_0 is computed as Q8_0"
    expected = quants.dequantize(raw, GGMLQuantizationType.TQ1_0)
    actual = unpacked(weights.matrices["embed.weight"], 0, pools)
    assert np.abs(actual - expected).max() < 0.01 * np.abs(expected).max()


def test_a_missing_tensor_is_named() -> None:
    tensors = dict(tensors_of(TensorType.F32))
    del tensors["down.weight"]
    with pytest.raises(GGUFError, match=r"'down\.weight' is missing"):
        load(program(), tensors)


def test_a_vector_in_a_matrixs_place_is_named() -> None:
    tensors = dict(tensors_of(TensorType.F32))
    tensors["router.weight"] = make_tensor(
        "router.weight", TensorType.F32, np.zeros(COLS, np.float32)
    )
    with pytest.raises(GGUFError, match=r"'router\.weight' has shape \(256,\)"):
        load(program(), tensors)


def test_pages_of_the_file_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    drop: Callable[[Tensor], None] = lambda tensor: dropped.append(tensor.name)  # noqa: E731
    monkeypatch.setattr(Tensor, "drop_pages", drop)
    load(program(), tensors_of(TensorType.Q8_0))
    assert set(dropped) == set(program().weights())
