"""The sampler against the definition in `SamplingArrays`, spelled out in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.backends.base import SamplingArrays
from localllm.backends.cpu.kernels.philox import uniform
from localllm.backends.cpu.kernels.sampling import SampleArgs, sample, scratch_bytes
from localllm.backends.reference.sampling import sample as reference_sample
from tests.backends.cpu.kernels.harness import Header, address, aligned, run

Floats = npt.NDArray[np.float32]


@dataclass
class Choice:
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    choice: int = 0
    index: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    history: dict[int, int] = field(default_factory=dict)
    mask: int | None = None  # bit t allows token t; the bits repeat every 61 tokens

    def allows(self, vocab: int) -> npt.NDArray[np.bool_]:
        bits = [self.mask is None or bool(self.mask >> (t % 61) & 1) for t in range(vocab)]
        return np.array(bits)


def masks_of(rows: list[Choice], vocab: int) -> npt.NDArray[np.uint32]:
    masked = [row.allows(-(-vocab // 32) * 32) for row in rows if row.mask is not None]
    packed = [np.packbits(bits, bitorder="little").view(np.uint32) for bits in masked]
    return np.concatenate(packed) if packed else np.zeros(0, np.uint32)


def arrays(rows: list[Choice], vocab: int) -> SamplingArrays:
    def ranges(lists: list[dict[int, float]] | list[dict[int, int]]) -> npt.NDArray[np.int32]:
        return np.cumsum([0, *map(len, lists)], dtype=np.int32)

    biases, histories = [r.bias for r in rows], [r.history for r in rows]
    numbers = np.cumsum([row.mask is not None for row in rows]).tolist()
    return SamplingArrays(
        temperature=np.array([r.temperature for r in rows], np.float32),
        top_k=np.array([r.top_k for r in rows], np.int32),
        top_p=np.array([r.top_p for r in rows], np.float32),
        min_p=np.array([r.min_p for r in rows], np.float32),
        repetition_penalty=np.array([r.repetition for r in rows], np.float32),
        presence_penalty=np.array([r.presence for r in rows], np.float32),
        frequency_penalty=np.array([r.frequency for r in rows], np.float32),
        seed=np.array([r.seed for r in rows], np.uint64),
        choice=np.array([r.choice for r in rows], np.uint32),
        index=np.array([r.index for r in rows], np.uint32),
        bias_start=ranges(biases),
        bias_ids=np.array([i for b in biases for i in b], np.int32),
        bias_values=np.array([v for b in biases for v in b.values()], np.float32),
        history_start=ranges(histories),
        history_ids=np.array([i for h in histories for i in h], np.int32),
        history_counts=np.array([c for h in histories for c in h.values()], np.int32),
        mask_rows=np.array(
            [-1 if row.mask is None else n - 1 for row, n in zip(rows, numbers, strict=True)],
            np.int32,
        ),
        masks=masks_of(rows, vocab),
    )


def draw(logits: Floats, rows: list[Choice], threads: int = 1) -> list[int]:
    """The tokens, which are the same with and without the largest of each eight logits."""
    rest = -logits.shape[1] % 8
    filled = np.pad(logits, ((0, 0), (0, rest)), constant_values=-np.inf)
    maxima = np.ascontiguousarray(filled.reshape(len(rows), -1, 8).max(axis=2))
    tokens = draw_by(None, logits, rows, threads)
    assert draw_by(maxima, logits, rows, threads) == tokens
    return tokens


def draw_by(maxima: Floats | None, logits: Floats, rows: list[Choice], threads: int) -> list[int]:
    vocab = logits.shape[1]
    stride = -(-vocab // 8) * 8
    padded = np.full((len(rows), stride), np.nan, np.float32)
    padded[:, :vocab] = logits
    before = padded.copy()
    tokens = np.full(len(rows), -7, np.int32)
    per_thread = scratch_bytes(vocab)
    scratch = aligned(per_thread * threads)
    words = SampleArgs(
        address(padded),
        stride,
        vocab,
        address(tokens),
        address(scratch),
        per_thread,
        address(maxima),
    )
    run(sample, words, Header(logit_rows=len(rows), sampling=arrays(rows, vocab)), threads)
    np.testing.assert_array_equal(padded, before)  # the logits stay raw
    return tokens.tolist()


@numba.njit
def random_number(seed, choice, index):  # type: ignore[no-untyped-def]
    return uniform(seed, choice, index)


def adjusted(logits: Floats, row: Choice) -> Floats:
    z = logits.copy()
    for token, value in row.bias.items():
        z[token] += np.float32(value)
    for token, count in row.history.items():
        repetition = np.float32(row.repetition)
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        if count:
            z[token] -= np.float32(row.presence) + np.float32(row.frequency) * np.float32(count)
    z[~row.allows(len(z))] = -np.inf
    return z


def allowed(logits: Floats, row: Choice, slack: float = 1e-5) -> set[int]:
    """The tokens that the definition gives when its boundaries may be off by rounding."""
    z = adjusted(logits, row)
    if row.temperature == 0:
        return {int(np.argmax(z))}
    order = np.argsort(-z, kind="stable")
    below = z[order].astype(np.float64) - z.max()
    weights = np.exp(below / np.float32(row.temperature))
    sums = np.cumsum(weights)
    kept = len(z) if row.top_k == 0 else min(row.top_k, len(z))
    total = sums[kept - 1]
    u = random_number(np.int64(np.uint64(row.seed)), row.choice, row.index)
    found = set()
    for tilt in (-slack, 0.0, slack):
        last = kept
        if row.top_p < 1:
            reached = sums[:kept] >= np.float32(row.top_p) * total * (1 + tilt)
            last = min(last, int(np.argmax(reached)) + 1 if reached.any() else kept)
        last = min(last, max(1, int(np.sum(weights >= np.float32(row.min_p) * (1 + tilt)))))
        for shake in (-slack, 0.0, slack):
            target = u * sums[last - 1] + shake * sums[last - 1]
            place = int(np.searchsorted(sums[:last], target, side="right"))
            found.add(int(order[min(place, last - 1)]))
    return found


choices = st.builds(
    Choice,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 10, 100, 1000]),
    top_p=st.sampled_from([1.0, 0.01, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=st.sampled_from([0.0, 0.7]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**32 - 1),
    bias=st.dictionaries(st.integers(0, 50), st.floats(-100, 100, width=32), max_size=4),
    history=st.dictionaries(st.integers(0, 50), st.integers(0, 5), max_size=8),
    mask=st.none() | st.integers(1, 2**50),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(choices, min_size=1, max_size=5),
    vocab=st.sampled_from([51, 64, 125, 1000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    grain=st.sampled_from([0.0, 0.5]),
    noise=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 2),
)
def test_agrees_with_the_definition(
    rows: list[Choice], vocab: int, spread: float, grain: float, noise: int, threads: int
) -> None:
    rng = np.random.default_rng(noise)
    logits = (rng.standard_normal((len(rows), vocab)) * spread).astype(np.float32)
    if grain:
        logits = np.round(logits / np.float32(grain)) * np.float32(grain)  # many ties, some -0
    tokens = draw(logits, rows, threads)
    for token, z, row in zip(tokens, logits, rows, strict=True):
        assert token in allowed(z, row)


def test_draws_the_reference_backends_tokens() -> None:
    rng = np.random.default_rng(3)
    n, vocab = 300, 2000
    logits = (rng.standard_normal((n, vocab)) * 3).astype(np.float32)
    rows = [
        Choice(
            temperature=float(rng.choice([0, 0.5, 1, 2])),
            top_k=int(rng.choice([0, 5, 300])),
            top_p=float(rng.choice([1, 0.8])),
            min_p=float(rng.choice([0, 0.02])),
            repetition=1.2,
            presence=0.3,
            frequency=0.1,
            seed=int(rng.integers(2**63)),
            index=i,
            bias={7: 2.0},
            history={int(t): int(t) % 3 for t in rng.permutation(vocab)[:100]},
            mask=int(rng.integers(1, 2**60)) if i % 3 == 0 else None,
        )
        for i in range(n)
    ]
    assert draw(logits, rows, threads=2) == reference_sample(logits, arrays(rows, vocab)).tolist()


def test_distribution_follows_the_probabilities() -> None:
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    n = 4000
    rows = [Choice(seed=1234, index=i) for i in range(n)]
    counts = np.bincount(draw(np.tile(logits, (n, 1)), rows), minlength=5)
    chi_square = np.sum((counts - n * probabilities) ** 2 / (n * probabilities))
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand seeds
    assert chi_square > 0.09  # and a fit this good would be as unlikely


def test_filters_cut_the_tail_of_many_draws() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1])).astype(np.float32)
    for row, kept in [
        (Choice(top_k=2), {1, 3}),
        (Choice(top_p=0.69), {1, 3}),
        (Choice(top_p=0.71), {1, 2, 3}),
        (Choice(top_k=3, top_p=0.8), {1, 3}),  # 0.7 of 0.85 is more than 0.8
        (Choice(min_p=0.3), {1, 2, 3}),
        (Choice(min_p=0.3, top_k=4, top_p=0.99), {1, 2, 3}),
    ]:
        rows = [Choice(**{**vars(row), "index": i}) for i in range(400)]
        assert set(draw(np.tile(logits, (400, 1)), rows)) == kept, row


def test_equal_logits_go_by_id() -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, [3, 30]] = -0.0
    assert draw(logits, [Choice(temperature=0)]) == [0]
    for index in range(20):
        row = Choice(index=index)
        expected = int(random_number(0, 0, index) * 40)
        assert draw(logits, [row]) == [expected]
        assert draw(logits, [Choice(index=index, top_k=1)]) == [0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_damaged_rows_give_minus_one_and_spare_the_others(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
    logits[1, 32] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    tokens = draw(logits, [Choice(temperature=temperature)] * 5)
    assert tokens[1:4] == [-1, -1, -1]
    assert tokens[0] >= 0
    assert tokens[4] == 0


def test_a_wide_vocabulary_and_a_flat_distribution() -> None:
    vocab = 70_001
    logits = np.random.default_rng(1).uniform(-1e-3, 1e-3, (3, vocab)).astype(np.float32)
    rows = [Choice(seed=s, top_p=p) for s, p in ((1, 1.0), (2, 0.5), (3, 0.999))]
    for token, z, row in zip(draw(logits, rows, 3), logits, rows, strict=True):
        assert token in allowed(z, row, slack=2e-7)
