"""Whole programs through the backend: against the reference, and against itself in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.backends.base import Backend, Batch, SamplingArrays, mask_words
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.cuda.step import CudaStep
from localllm.backends.direct import DirectRunner
from localllm.backends.program import FloatArray, Program
from localllm.backends.reference import ReferenceBackend
from localllm.backends.reference import sampling as reference_sampling
from localllm.errors import DeviceOutOfMemoryError
from localllm.gguf import Tensor, TensorType
from tests.backends.cpu.programs import PROGRAMS, VOCAB, nmse, random_tensors, second_halves
from tests.backends.cuda.devices import DEVICES, on_gpu

pytestmark = pytest.mark.torch

CONTEXT = 64
LENGTHS = (26, 3, 5)  # one longer than the window, and past the end of a block
SEQUENCES = [
    np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    for seed, length in enumerate(LENGTHS)
]

SPARE = 17  # the block of each cache that no sequence has


def mixed(name: str) -> TensorType:
    """As files do it: formats differ within one fused projection; floats come in three.

    Gate and up are one matrix, which floats may be whatever their rows.
    """
    kinds = {
        "q.weight": TensorType.Q4_0,
        "v.weight": TensorType.F16,
        "out.weight": TensorType.BF16,
        "gate.weight": TensorType.F16,
        "up.weight": TensorType.F16,
        "down.weight": TensorType.MXFP4,
    }
    return kinds.get(name, TensorType.F32 if name == "router.weight" else TensorType.Q8_0)


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]()


def runner(backend: Backend, program: Program, tensors: dict[str, Tensor]) -> DirectRunner:
    return DirectRunner(
        backend, program, tensors, context=CONTEXT, max_seqs=len(SEQUENCES) + 1, max_tokens=40
    )


@pytest.mark.parametrize("device", DEVICES)
def test_every_op_agrees_with_the_reference_and_fusing_changes_no_bit(
    program: Program, device: str
) -> None:
    tensors = random_tensors(program, mixed)
    ours = runner(CudaBackend("float32", device), program, tensors)
    theirs = runner(ReferenceBackend(), program, tensors)
    short = [tokens[:6] for tokens in SEQUENCES]
    batch = second_halves(ours, short)
    actual, expected = ours.step.trace(batch), theirs.step.trace(second_halves(theirs, short))
    assert len(actual) == len(expected) == len(program.ops)
    for op, a, e in zip(program.ops, actual, expected, strict=True):
        assert a.shape == e.shape, op
        assert a.dtype == np.float32, op
        assert nmse(a, e) < 1e-9, op
    ours.step.submit(batch)
    ours.step.collect()
    assert np.array_equal(ours.step.logits(), actual[-1])


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("dense", "cpu", "float16"),
        ("experts", "cpu", "float32"),
        *(on_gpu(name, "cuda", "bfloat16") for name in PROGRAMS),
    ],
)
def test_the_same_bytes_in_any_company(name: str, device: str, dtype: str) -> None:
    """Alone and whole, or together token by token, in steps that are filled up with others."""
    program = PROGRAMS[name]()
    sequences = [s if name == "dense" or device == "cuda" else s[:7] for s in SEQUENCES]
    tensors = random_tensors(program, mixed)
    run = runner(CudaBackend(dtype, device), program, tensors)
    expected = [run.logits(tokens, chunk=len(tokens))[0] for tokens in sequences]
    exact = runner(ReferenceBackend(), program, tensors)
    for tokens, e in zip(sequences, expected, strict=True):
        assert nmse(e, exact.logits(tokens, chunk=len(tokens))[0]) < 5e-3
    together = runner(CudaBackend(dtype, device), program, tensors)
    chunks = [len(sequences[0]) - 6, 1, 3]
    for a, e in zip(together.logits(*sequences, chunk=chunks), expected, strict=True):
        assert np.array_equal(a, e)
    for a, e in zip(together.logits(*[s[:1] for s in sequences], chunk=1), expected, strict=True):
        assert np.array_equal(a, e[:1])


@pytest.fixture(params=DEVICES)
def small(request: pytest.FixtureRequest) -> DirectRunner:
    program = PROGRAMS["plain"]()
    backend = CudaBackend("float32", request.param)
    return runner(backend, program, random_tensors(program, mixed))


def sampled(batch: Batch, seed: int) -> SamplingArrays:
    """Every row by rules of its own."""
    draw, rows = np.random.default_rng(seed), batch.logit_rows.size
    s = SamplingArrays.greedy(rows)
    s.temperature[:] = draw.choice([0, 0.7, 2], rows)
    s.top_k[:] = draw.choice([0, 5, 40], rows)
    s.top_p[:] = draw.choice([1, 0.8], rows)
    s.seed[:] = draw.integers(0, 2**64, rows, dtype=np.uint64)
    s.index[:] = draw.integers(0, 2**32, rows, dtype=np.uint32)
    s.presence_penalty[:] = 2.0
    for name, per_row in (("bias", 3), ("history", 4)):
        setattr(s, f"{name}_start", np.arange(rows + 1, dtype=np.int32) * per_row)
        ids = [draw.permutation(VOCAB)[:per_row] for _ in range(rows)]
        setattr(s, f"{name}_ids", np.concatenate(ids).astype(np.int32))
    s.bias_values = draw.normal(0, 5, 3 * rows).astype(np.float32)
    s.history_counts = np.ones(4 * rows, np.int32)
    batch.sampling = s
    return s


def test_tokens_are_those_of_the_reference_sampler(small: DirectRunner) -> None:
    """In a step as it is, in one that is filled up, and with masks that come late."""
    whole = small.batch([(0, 0, SEQUENCES[0][:7])])
    decode = small.batch([(n, 0, tokens[:1]) for n, tokens in enumerate(SEQUENCES)])
    for seed, batch in enumerate((whole, decode, decode)):
        s = sampled(batch, seed)
        if seed == 2:
            s.mask_rows[1:] = [1, 0]
            s.masks = np.zeros(2 * mask_words(VOCAB), np.uint32)
        small.step.submit(batch)
        if seed == 2:
            s.masks[[1, mask_words(VOCAB)]] = 0b1100, 0b11
        tokens = small.step.collect()
        assert np.array_equal(tokens, reference_sampling.sample(small.step.logits(), s))
        if seed == 2:
            assert tokens[1] in (0, 1)
            assert tokens[2] in (34, 35)


def test_more_penalties_than_were_expected_go_by_themselves(
    small: DirectRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = small.batch([(n, 0, tokens[:1]) for n, tokens in enumerate(SEQUENCES)])
    s = sampled(batch, 7)
    small.step.submit(batch)
    expected = small.step.collect()
    step = small.step
    assert isinstance(step, CudaStep)
    used = next(iter(step._inputs.values()))._at
    monkeypatch.setattr(step._staging, "words", used + 70)
    small.step.submit(batch)
    assert np.array_equal(small.step.collect(), expected)
    assert np.array_equal(expected, reference_sampling.sample(small.step.logits(), s))


def test_a_step_without_logit_rows(small: DirectRunner) -> None:
    for tokens in (SEQUENCES[0][:2], SEQUENCES[0][:1]):
        batch = small.batch([(0, 0, tokens)])
        batch.logit_rows = batch.logit_rows[:0]
        batch.sampling = SamplingArrays.greedy(0)
        small.step.submit(batch)
        assert small.step.collect().size == 0
        assert small.step.logits().shape == (0, VOCAB)


def test_bad_batches_are_refused(small: DirectRunner) -> None:
    with pytest.raises(ValueError, match="52 tokens, the step was compiled for 40"):
        small.step.submit(small.batch([(0, 0, SEQUENCES[0]), (1, 0, SEQUENCES[0])]))
    batch = small.batch([(0, 0, SEQUENCES[1])])
    batch.ids[1] = VOCAB
    with pytest.raises(ValueError, match="token ids outside"):
        small.step.submit(batch)
    batch = small.batch([(0, 0, SEQUENCES[1])])
    batch.slots[:] = 16 * SPARE  # the block that belongs to nobody
    with pytest.raises(ValueError, match="slots outside of the 17 blocks"):
        small.step.submit(batch)


def test_rows_that_fill_a_step_up_touch_nobodys_block(small: DirectRunner) -> None:
    step = small.step
    assert isinstance(step, CudaStep)
    cache = step._caches.layers[0][0]
    small.step.submit(small.batch([(n, 0, SEQUENCES[n][:1]) for n in (0, 1, 2)]))
    small.step.collect()
    cache.keys[SPARE] = 0
    before = cache.keys.clone()
    decode = small.batch([(n, 1, SEQUENCES[n][1:2]) for n in (2, 0, 1)])
    small.step.submit(decode)
    small.step.collect()
    changed = (cache.keys != before).flatten(1).any(1).nonzero().flatten().tolist()
    written = sorted((decode.slots[0] // 16).tolist())
    assert [block for block in changed if block != SPARE] == written
    assert len(written) == 3
    assert SPARE in changed


def logits_of(run: DirectRunner, tokens: list[int]) -> FloatArray:
    return run.logits(tokens, chunk=len(tokens))[0]


def test_a_step_that_ran_out_of_memory_is_told_and_the_next_one_is_right(
    small: DirectRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(small, SEQUENCES[1])
    step = small.step
    assert isinstance(step, CudaStep)

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More. And.")

    with monkeypatch.context() as patch:
        patch.setattr(step, "_forward", fail)
        with pytest.raises(DeviceOutOfMemoryError, match="Tried to allocate 2 GiB") as caught:
            logits_of(small, SEQUENCES[0])
    assert caught.value.__context__ is None, "which would keep the step's tensors"
    with pytest.raises(RuntimeError, match="nothing was submitted"):
        small.step.collect()
    assert np.array_equal(logits_of(small, SEQUENCES[1]), expected)
