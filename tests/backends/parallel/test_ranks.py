"""Divided programs compute what whole ones do: ranks as threads, on torch's CPU device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localllm.backends.direct import DirectRunner  # noqa: E402
from localllm.backends.parallel.communicator import Communicator  # noqa: E402
from localllm.backends.parallel.shard import divide  # noqa: E402
from localllm.backends.program import FloatArray, Moe, Program  # noqa: E402
from localllm.backends.torch_common.backend import TorchBackend  # noqa: E402
from localllm.errors import UnsupportedArchitectureError  # noqa: E402
from localllm.gguf import GGUFFile, Tensor, TensorType  # noqa: E402
from localllm.models import build_program, trained_context  # noqa: E402
from tests.backends.cpu.programs import CONTEXT, PROGRAMS, VOCAB, random_tensors  # noqa: E402
from tests.backends.parallel.threads import logits_of_ranks  # noqa: E402
from tests.helpers import ArchitectureCase, architecture_cases  # noqa: E402

pytestmark = pytest.mark.torch

TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3}
# Windows, heads that share keys, experts with a shared one, a fused projection, branches side by
# side, blocks that heads do not divide, norms over all heads, a tied output, an odd vocabulary.
AT_ALL_SIZES = (
    "cohere2-5layers",
    "gemma3-7layers",
    "granitemoe-moe",
    "llama-format-q4_k_s",
    "llama-gqa",
    "llama-vocab125",
    "olmo2-dense",
    "phi3-dense",
    "qwen3-long",
)
# 6 query heads on 2 KV heads of 16: groups that are cut, KV heads that are repeated.
SEQUENCES = [
    np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    for seed, length in enumerate((70, 3, 41))
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_cpu(dtype: str) -> Callable[[Communicator], TorchBackend]:
    return lambda comm: TorchBackend("cpu", dtype, threads=1, comm=comm)


def check_case(case: ArchitectureCase, tensor_ranks: int, stages: int) -> None:
    tokens, expected = case.tokens().tolist(), case.logits()
    with GGUFFile.open(case.gguf) as file:
        context = trained_context(file)
        try:
            program = build_program(file, context)
        except UnsupportedArchitectureError as error:
            pytest.skip(str(error))
        pieces = divide(program, file.tensors, tensor_ranks, stages)
        for dtype, tolerance in TOLERANCE.items():
            ranks = logits_of_ranks(
                pieces, file.tensors, on_cpu(dtype), tokens, context=context, chunk=len(tokens)
            )
            for (logits,) in ranks:
                assert np.array_equal(logits, ranks[0][0])
            assert distance(program, dtype, ranks[0][0], expected) < tolerance, dtype


def distance(program: Program, dtype: str, found: FloatArray, expected: FloatArray) -> float:
    """NMSE; with rounded experts that of the median token, as the nearest may be chosen wrong."""
    errors = np.square(found - expected).mean(1) / np.square(expected).mean()
    routed = any(isinstance(op, Moe) for op in program.ops)
    return float(np.median(errors) if routed and dtype != "float32" else errors.mean())


@pytest.mark.parametrize("case", architecture_cases(), ids=lambda case: case.name)
def test_two_stages_of_two_ranks(case: ArchitectureCase) -> None:
    check_case(case, 2, 2)


@pytest.mark.parametrize(("tensor_ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("case", architecture_cases(*AT_ALL_SIZES), ids=lambda case: case.name)
def test_other_sizes(case: ArchitectureCase, tensor_ranks: int, stages: int) -> None:
    check_case(case, tensor_ranks, stages)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", architecture_cases("qwen3-*"), ids=lambda case: case.name)
def test_a_rank_for_each_of_four_heads(case: ArchitectureCase, stages: int) -> None:
    check_case(case, 4, stages)


def mixed(name: str) -> TensorType:
    """Blocks of 32 hold two heads; formats differ within one fused projection."""
    kinds = {"q.weight": TensorType.Q4_0, "v.weight": TensorType.F16, "up.weight": TensorType.BF16}
    return kinds.get(name, TensorType.F32 if name == "router.weight" else TensorType.Q8_0)


def floats(_name: str) -> TensorType:
    return TensorType.F32


def run_ranks(
    program: Program,
    tensors: dict[str, Tensor],
    size: tuple[int, int],
    *sequences: Sequence[int],
    chunk: int,
) -> list[FloatArray]:
    pieces = divide(program, tensors, *size)
    ranks = logits_of_ranks(
        pieces, tensors, on_cpu("float32"), *sequences, context=CONTEXT, chunk=chunk
    )
    for rank in ranks:
        for own, first in zip(rank, ranks[0], strict=True):
            assert np.array_equal(own, first)
    return ranks[0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("kinds", [mixed, floats])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_op_however_uneven_the_shares(name: str, kinds: object, ranks: int) -> None:
    assert callable(kinds)
    program = PROGRAMS[name]()
    tensors = random_tensors(program, kinds)
    whole = DirectRunner(
        TorchBackend(threads=1), program, tensors, context=CONTEXT, max_seqs=len(SEQUENCES)
    )
    expected = whole.logits(*SEQUENCES, chunk=50)
    found = run_ranks(program, tensors, (ranks, 1), *SEQUENCES, chunk=50)
    for a, e in zip(found, expected, strict=True):
        assert np.square(a - e).sum() / np.square(e).sum() < 1e-10


@pytest.mark.parametrize("size", [(2, 1), (3, 1), (2, 2)])
def test_the_same_bytes_in_any_company(size: tuple[int, int]) -> None:
    program = PROGRAMS["dense"]()
    tensors = random_tensors(program, mixed)
    together = run_ranks(program, tensors, size, *SEQUENCES, chunk=13)
    for tokens, logits in zip(SEQUENCES, together, strict=True):
        (alone,) = run_ranks(program, tensors, size, tokens, chunk=len(tokens))
        assert np.array_equal(alone, logits)


def test_a_part_without_other_ranks_is_refused() -> None:
    program = PROGRAMS["dense"]()
    tensors = random_tensors(program, floats)
    with pytest.raises(ValueError, match="there are no other ranks"):
        run_part_alone(program, tensors)


def run_part_alone(program: Program, tensors: dict[str, Tensor]) -> None:
    piece = divide(program, tensors, 1, 2)[0][0]
    DirectRunner(TorchBackend(threads=1), piece.program, tensors, context=CONTEXT)
