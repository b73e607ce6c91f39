"""Parts of divided programs on the CUDA backend: together they do what the whole does."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.direct import DirectRunner
from localllm.backends.parallel.shard import divide
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import TensorType
from tests.backends.cpu.programs import PROGRAMS, VOCAB, nmse, random_tensors
from tests.backends.cuda.devices import DEVICES
from tests.backends.parallel.threads import logits_of_ranks

pytestmark = pytest.mark.torch

CONTEXT = 48
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 7).tolist()


def mixed(name: str) -> TensorType:
    """Blocks of 32 hold two of six heads; formats differ within one fused projection."""
    kinds = {"q.weight": TensorType.Q4_0, "v.weight": TensorType.F16, "down.weight": TensorType.F32}
    return kinds.get(name, TensorType.F32 if name == "router.weight" else TensorType.Q8_0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "size"), [("dense", (2, 2)), ("dense", (4, 1)), ("plain", (3, 1)), ("experts", (2, 1))]
)
def test_parts_do_what_the_whole_does(name: str, size: tuple[int, int], device: str) -> None:
    program = PROGRAMS[name]()
    tensors = random_tensors(program, mixed)
    whole = DirectRunner(ReferenceBackend(), program, tensors, context=CONTEXT)
    (expected,) = whole.logits(TOKENS, chunk=len(TOKENS))
    ranks = logits_of_ranks(
        divide(program, tensors, *size),
        tensors,
        lambda comm: CudaBackend("float32", device, comm=comm),
        TOKENS,
        context=CONTEXT,
        chunk=5,
        max_tokens=8,
    )
    for (logits,) in ranks:
        assert np.array_equal(logits, ranks[0][0])
        assert nmse(logits, expected) < 1e-9
