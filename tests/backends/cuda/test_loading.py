"""Weights as the backend brings them to the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from localllm.backends.cuda import weights as module
from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import QUANTIZED, PackedWeight
from localllm.backends.cuda.weights import Weights
from localllm.backends.program import FloatArray, Program
from localllm.errors import GGUFError
from localllm.gguf import Tensor, TensorType
from tests.backends.cpu.programs import PROGRAMS, make_tensor, random_tensors

pytestmark = pytest.mark.torch


def load(
    program: Program, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Weights, list[str]]:
    lines: list[str] = []
    return Weights.load(torch.device("cpu"), dtype, program, tensors, lines.append), lines


def kinds(**special: TensorType) -> Callable[[str], TensorType]:
    return lambda name: special.get(name.removesuffix(".weight"), TensorType.Q8_0)


def rows_of(weight: PackedWeight) -> FloatArray:
    out = torch.empty(weight.rows, weight.cols)
    embed(torch.arange(weight.rows, dtype=torch.int32), weight, out)
    values: FloatArray = out.numpy()
    return values


def joined() -> Program:
    """Rows that are whole tiles, and rows that are not."""
    p = Program({"a": (128, 64), "b": (70, 64), "c": (64, 64), "embed": (70, 64)})
    x = p.embed("embed")
    p.finish(p.linear(x, "a", "b", "c", "embed", shard="none", biases=[None] * 4))
    return p


def test_neighbours_of_one_format_are_one_matrix_and_tied_ones_are_shared() -> None:
    program = joined()
    tensors = random_tensors(program, kinds())
    weights, lines = load(program, tensors)
    products = weights.products["a", "b", "c", "embed"]
    assert [w.rows for w in products] == [128 + 70, 64, 70]  # behind b lies half a tile
    assert products[2] is weights.matrices["embed"]
    assert set(weights.matrices) == {"c", "embed"}
    expected = np.concatenate([tensors[name].dequantize() for name in "ab"])
    np.testing.assert_allclose(rows_of(products[0]), expected, rtol=0, atol=1e-6)
    assert lines == []


def test_other_formats_stay_apart() -> None:
    program = joined()
    weights, _ = load(program, random_tensors(program, kinds(b=TensorType.Q4_0)))
    assert [w.rows for w in weights.products["a", "b", "c", "embed"]] == [128, 70, 64, 70]


@pytest.mark.parametrize("kind", [TensorType.Q4_0, TensorType.Q4_1, TensorType.F16])
@pytest.mark.parametrize("rows", [128, 100])
def test_slabs_make_no_difference(
    kind: TensorType, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Program({"embed": (9, 64), "r": (3, 64), "w": (3, rows, 64), "d": (3, 64, rows)})
    x = p.embed("embed")
    logits = p.linear(x, "r", shard="none", biases=[None])
    p.finish(p.moe(x, logits, gate="w", up="w", down="d", used=1))
    values = np.random.default_rng(1).normal(0, 1, (3, rows, 64)).astype(np.float32)
    tensors = random_tensors(p, kinds(d=TensorType.F32))
    tensors["w"] = make_tensor("w", kind, values)
    whole = load(p, tensors)[0].matrices["w"]
    monkeypatch.setattr(module, "SLAB_BYTES", 1)
    pieces = load(p, tensors)[0].matrices["w"]
    assert (whole.rows, whole.cols, whole.experts) == (rows, 64, 3)
    for name in ("codes", "high", "scales", "supers"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name


def test_floats_are_kept_in_the_type_of_the_products_but_for_routers() -> None:
    program = PROGRAMS["experts"]()
    tensors = random_tensors(program, lambda _: TensorType.F32)
    weights, lines = load(program, tensors, torch.bfloat16)
    assert weights.matrices["down.weight"].type == TensorType.BF16
    assert weights.products["router.weight",][0].type == TensorType.F32
    assert lines == []


def test_a_format_without_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUANTIZED", QUANTIZED - {TensorType.Q4_0})
    program = joined()
    tensors = random_tensors(program, kinds(a=TensorType.Q4_0, c=TensorType.Q4_0))
    weights, lines = load(program, tensors, torch.float16)
    assert lines == ["a and 1 more: Q4_0 is kept as float16"]
    first = weights.products["a", "b", "c", "embed"][0]
    assert first.type == TensorType.F16
    np.testing.assert_allclose(rows_of(first), tensors["a"].dequantize(), rtol=1e-3, atol=1e-6)


def test_vectors_of_any_float_type() -> None:
    program = PROGRAMS["plain"]()
    tensors = random_tensors(program, kinds())
    values = tensors["norm"].dequantize()
    tensors["norm"] = make_tensor("norm", TensorType.BF16, values)
    vector = load(program, tensors)[0].vectors["norm"]
    assert vector.dtype == torch.float32
    np.testing.assert_allclose(vector.numpy(), values, rtol=2**-8)


def test_what_is_missing_or_no_matrix_is_named() -> None:
    program = joined()
    tensors = random_tensors(program, kinds())
    tensors["c"] = make_tensor("c", TensorType.F32, np.zeros(64, np.float32))
    with pytest.raises(GGUFError, match="'c' has shape"):
        load(program, tensors)
    del tensors["c"]
    with pytest.raises(GGUFError, match="'c' is missing"):
        load(program, tensors)
