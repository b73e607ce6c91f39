"""What the backend asks of Apple's GPUs is what torch can do there, as far as can be told here."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.mps.backend import MpsBackend  # noqa: E402
from localllm.backends.program import KVLayer  # noqa: E402
from localllm.backends.torch_common.dequantize import DEQUANTIZERS  # noqa: E402
from localllm.backends.torch_common.kv_cache import LayerCache  # noqa: E402
from localllm.gguf import TensorType  # noqa: E402
from localllm.gguf.blocks import type_size  # noqa: E402
from tests.backends.cpu.programs import PROGRAMS, VOCAB, random_tensors  # noqa: E402
from tests.backends.mps.elsewhere import (  # noqa: E402
    DEVICE,
    Elsewhere,
    ElsewhereTarget,
    ShadersElsewhere,
)
from tests.backends.mps.metal_operations import kernels  # noqa: E402

pytestmark = pytest.mark.torch

WITH_KERNELS = frozenset(
    [
        "__lshift__.Scalar",
        "__rshift__.Scalar",
        "add.Tensor",
        "add_.Tensor",
        "amax",
        "bitwise_and.Tensor",
        "bitwise_not",
        "bitwise_or.Tensor",
        "bmm",
        "cat",
        "ceil",
        "clamp",
        "div.Tensor",
        "empty.memory_format",
        "eq.Scalar",
        "erf",
        "exp",
        "floor",
        "floor_divide",
        "index_select",
        "lt.Scalar",
        "maximum",
        "mm",
        "mul.Tensor",
        "neg",
        "permute",
        "reciprocal",
        "sqrt",
        "sub.Tensor",
        "tanh",
        "view",
        "where.self",
    ]
)
# Operations that torch makes of others, and of which.
MADE_OF = {
    "_to_copy": ("empty_strided", "_copy_from"),
    "_unsafe_view": ("view",),
    "abs": ("abs.out",),
    "alias": ("as_strided",),
    "bitwise_and.Scalar": ("bitwise_and.Tensor",),
    "clone": ("empty.memory_format", "empty_strided", "_copy_from"),
    "copy_": ("_copy_from",),
    "detach": ("as_strided",),
    "expand": ("as_strided",),
    "index_put_": ("_index_put_impl_",),
    "masked_fill.Scalar": ("masked_fill_.Scalar",),
    "new_full": ("empty.memory_format", "fill_.Scalar"),
    "new_ones": ("empty.memory_format", "fill_.Scalar"),
    "new_zeros": ("empty.memory_format", "zero_"),
    "rsub.Scalar": ("sub.Tensor",),
    "scalar_tensor": ("empty.memory_format", "fill_.Scalar"),
    "select.int": ("as_strided",),
    "slice.Tensor": ("as_strided",),
    "split_with_sizes": ("as_strided",),
    "stack": ("cat",),
    "transpose.int": ("as_strided",),
    "unsqueeze": ("as_strided",),
    "view.dtype": ("as_strided",),
    "zeros": ("empty.memory_format", "zero_"),
    "zeros_like": ("empty_strided", "zero_"),
}
OPERATIONS = WITH_KERNELS | MADE_OF.keys()


def kinds(name: str) -> TensorType:
    """Formats with a Metal kernel, without one, and floats."""
    found = {
        "q.weight": TensorType.Q4_0,
        "k.weight": TensorType.Q5_0,
        "up.weight": TensorType.F16,
        "router.weight": TensorType.F32,
    }
    return found.get(name, TensorType.Q8_0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_use_listed_operations_on_one_device(name: str) -> None:
    program, shaders = PROGRAMS[name](), ShadersElsewhere()
    backend = MpsBackend(device="cpu", shaders=shaders)
    backend.target = ElsewhereTarget(DEVICE, torch.bfloat16, 64)
    tensors = random_tensors(program, kinds)
    with Elsewhere() as elsewhere:
        run = DirectRunner(backend, program, tensors, context=300)
        run.logits(np.random.default_rng(0).integers(0, VOCAB, 280).tolist(), chunk=100)
    found = {operation.removeprefix("aten::") for operation in elsewhere.operations}
    assert found <= OPERATIONS, found - OPERATIONS
    assert {"bmm", "mm", "index_put_", "index_select", "exp"} <= found
    assert {"matvec_q4_0", "matvec_q8_0"} == set(shaders.launches)


def test_blocks_and_caches_use_listed_operations() -> None:
    with Elsewhere() as elsewhere:
        for kind, dequantize in DEQUANTIZERS.items():
            dequantize(torch.zeros(2, type_size(kind), dtype=torch.uint8, device=DEVICE))
        target = ElsewhereTarget(DEVICE, torch.bfloat16, 64, quantized_kv=True)
        cache = LayerCache.empty(target, KVLayer(2, 64, 64), 3)
        slots = torch.tensor([1, 2]).to(DEVICE)
        cache.keys.store(torch.zeros(2, 128, device=DEVICE), slots)
        cache.keys.gather(slots)
    found = {operation.removeprefix("aten::") for operation in elsewhere.operations}
    assert found <= OPERATIONS, found - OPERATIONS
    assert {"__rshift__.Scalar", "ceil", "index_put_"} <= found


@pytest.mark.parametrize("operation", sorted(WITH_KERNELS | set().union(*MADE_OF.values())))
def test_torch_has_the_operation_on_metal(operation: str) -> None:
    assert "MPS" in kernels(f"aten::{operation}")


@pytest.mark.parametrize("operation", MADE_OF)
def test_torch_makes_the_operation_of_others(operation: str) -> None:
    assert any(key.startswith("CompositeExplicit") for key in kernels(f"aten::{operation}"))


def test_the_watch_sees_what_it_should() -> None:
    """An operation that Metal lacks, devices that mix, and float64."""
    assert "MPS" not in kernels("aten::_linalg_eigh")
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    with Elsewhere() as elsewhere:
        assert not torch.softmax(there, 0).cpu().any()
        with pytest.raises(AssertionError, match=r"add\.Tensor mixes devices"):
            there + here
        with pytest.raises(AssertionError, match="_to_copy in float64"):
            there.double()
        here.double()
    assert "aten::_softmax" in elsewhere.operations
