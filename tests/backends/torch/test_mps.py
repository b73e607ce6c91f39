"""The backend for Apple's GPUs, on torch's CPU device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.host_memory import memory_info  # noqa: E402
from localllm.backends.mps.backend import MpsBackend  # noqa: E402
from localllm.backends.torch_common.dequantize import DEQUANTIZERS  # noqa: E402
from localllm.gguf import TensorType  # noqa: E402
from localllm.gguf.blocks import type_size  # noqa: E402
from tests.backends.cpu.programs import PROGRAMS, VOCAB, random_tensors  # noqa: E402

pytestmark = pytest.mark.torch

# Believed to be in torch's Metal backend, which no test here can ask; `index_copy_` came late.
METAL_HAS = frozenset(
    [
        "__and__",
        "__lshift__",
        "__rshift__",
        "_to_copy",
        "add",
        "alias",
        "amax",
        "amin",
        "arange",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bmm",
        "cat",
        "clamp",
        "clone",
        "contiguous",
        "copy_",
        "cos",
        "detach",
        "div",
        "empty",
        "eq",
        "erf",
        "exp",
        "expand",
        "flatten",
        "floor",
        "floor_divide",
        "index",
        "index_put_",
        "index_select",
        "isfinite",
        "lift_fresh",
        "log1p",
        "mT",
        "masked_fill",
        "matmul",
        "maximum",
        "mul",
        "neg",
        "new_full",
        "new_ones",
        "new_zeros",
        "nonzero",
        "numpy_T",
        "permute",
        "reciprocal",
        "reshape",
        "resolve_conj",
        "resolve_neg",
        "rsub",
        "select",
        "sin",
        "slice",
        "sort",
        "split",
        "sqrt",
        "stack",
        "sub",
        "tanh",
        "to",
        "transpose",
        "unsqueeze",
        "view",
        "where",
        "zeros",
        "zeros_like",
    ]
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the operations that reach a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def kinds(name: str) -> TensorType:
    found = {
        "q.weight": TensorType.Q4_0,
        "up.weight": TensorType.F16,
    }
    return found.get(name, TensorType.Q8_0)


def test_the_operations_are_those_that_metal_has() -> None:
    with Recorder() as recorder:
        for make in PROGRAMS.values():
            program = make()
            tensors = random_tensors(program, kinds)
            run = DirectRunner(MpsBackend(device="cpu"), program, tensors, context=300)
            run.logits(np.random.default_rng(0).integers(0, VOCAB, 280).tolist(), chunk=100)
        for kind, dequantize in DEQUANTIZERS.items():
            dequantize(torch.zeros(2, type_size(kind), dtype=torch.uint8))
    assert recorder.names <= METAL_HAS
    assert {"bmm", "matmul", "index_put_", "sort"} <= recorder.names


def test_memory_is_the_machines_own() -> None:
    backend = MpsBackend(device="cpu")
    assert backend.memory().total == memory_info().total
    assert backend.target.dtype == torch.bfloat16
