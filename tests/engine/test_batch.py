"""The arrays of a step against a slow and obvious way to make them."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import BLOCK_TOKENS, StepLimits
from localllm.engine.batch import BatchBuilder
from localllm.engine.kv_manager import SequenceBlocks
from localllm.engine.messages import Submit
from localllm.engine.restrictions import Restriction
from localllm.engine.sampling_rows import SamplingRows
from localllm.engine.sequence import Chunk, Plan, Sequence
from localllm.sampling_params import SamplingParams
from tests.engine.fakes import WORDS, fake_vocabulary

LIMITS = StepLimits(tokens=128, seqs=8, logit_rows=32, context=160)


def sequence(
    prompt: tuple[int, ...],
    params: SamplingParams | None = None,
    *,
    choice: int = 0,
    prompt_logits: bool = False,
) -> Sequence:
    request = Submit(
        "s",
        prompt,
        params or SamplingParams(seed=1),
        frozenset(),
        choice=choice,
        prompt_logits=prompt_logits,
    )
    return Sequence(request, 0, SequenceBlocks((array("i"), array("i")), [0, 0], b""))


def random_plan(draw: random.Random) -> Plan:
    chunks = []
    for _ in range(draw.randint(1, 8)):
        one = sequence(tuple(draw.randrange(1000) for _ in range(draw.randint(1, 90))))
        end = draw.randint(1, len(one.tokens))
        start = draw.randint(max(0, end - 16), end - 1)
        for g, table in enumerate(one.blocks.tables):
            n_blocks = -(-end // BLOCK_TOKENS)
            table.extend(draw.randrange(50) for _ in range(n_blocks))
            for i in range(draw.randint(0, start // BLOCK_TOKENS) if g else 0):
                table[i] = -1
        chunks.append(Chunk(one, start, end, draw.randint(0, min(4, end - start))))
    return Plan(tuple(chunks))


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_holds_what_the_plan_says(seed: int) -> None:
    draw = random.Random(seed)
    builder = BatchBuilder(LIMITS, n_groups=2, vocab=50)
    for _ in range(3):  # arrays are used again
        plan = random_plan(draw)
        batch = builder.build(plan)
        ids, positions, slots, rows, starts = [], [], [[], []], [], [0]  # type: ignore[var-annotated]
        for c in plan.chunks:
            ids += c.sequence.tokens[c.start : c.end]
            positions += range(c.start, c.end)
            for g in range(2):
                table = c.sequence.blocks.tables[g]
                slots[g] += [table[p // 16] * 16 + p % 16 for p in range(c.start, c.end)]
            starts.append(len(ids))
            rows += range(len(ids) - c.rows, len(ids))
        assert batch.ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.slots.tolist() == slots
        assert batch.logit_rows.tolist() == rows
        assert batch.query_start.tolist() == starts
        assert batch.seq_lens.tolist() == [c.end for c in plan.chunks]
        for g in range(2):
            for s, c in enumerate(plan.chunks):
                blocks = list(c.sequence.blocks.tables[g])
                padding = batch.block_tables.shape[2] - len(blocks)
                assert batch.block_tables[g, s].tolist() == blocks + [-1] * padding
        for name in ("ids", "positions", "query_start", "seq_lens", "slots", "block_tables"):
            assert getattr(batch, name).dtype == np.int32, name
            assert getattr(batch, name).flags.c_contiguous, name
        assert batch.logit_rows.dtype == np.int32
        assert len(batch.sampling.seed) == len(rows)


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_made_ahead_is_the_one_that_is_built_with_the_tokens(seed: int) -> None:
    draw = random.Random(seed)
    here, there = (BatchBuilder(LIMITS, n_groups=2, vocab=1000) for _ in range(2))
    sequences = [chunk.sequence for chunk in random_plan(draw).chunks]
    plan = Plan(tuple(Chunk(s, len(s.tokens) - 1, len(s.tokens), 1) for s in sequences))
    for chunk in plan.chunks:
        for table in chunk.sequence.blocks.tables:
            while len(table) * BLOCK_TOKENS < chunk.end + 3:
                table.append(draw.randrange(50))
    batch = here.build(plan)
    for _ in range(3):
        plan = Plan(tuple(Chunk(c.sequence, c.end, c.end + 1, 1) for c in plan.chunks))
        batch = there.advance(batch, plan)
        batch.ids[:] = [draw.randrange(1000) for _ in plan.chunks]
        for chunk, token in zip(plan.chunks, batch.ids.tolist(), strict=True):
            chunk.sequence.tokens.append(token)
        built = BatchBuilder(LIMITS, n_groups=2, vocab=1000).build(plan)
        for name in ("ids", "positions", "query_start", "seq_lens", "slots", "block_tables"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(built, name), name)
        np.testing.assert_array_equal(batch.logit_rows, built.logit_rows)
        for name, array_ in vars(built.sampling).items():
            np.testing.assert_array_equal(getattr(batch.sampling, name), array_, name)
            assert getattr(batch.sampling, name).dtype == array_.dtype
        here, there = there, here


def test_sampling_arrays_follow_the_rows() -> None:
    rows = SamplingRows(2)
    plain = sequence((1, 2), SamplingParams(temperature=0.5, top_k=2**40, seed=2**63))
    biased = sequence((3,), SamplingParams(logit_bias={9: 1.5, 4: -2.0}, seed=7), choice=3)
    arrays = rows.arrays([plain, biased, plain])
    assert arrays.temperature.tolist() == [0.5, 1.0, 0.5]
    assert arrays.top_k.tolist() == [2**31 - 1, 0, 2**31 - 1]
    assert arrays.seed.tolist() == [2**63, 7, 2**63]
    assert arrays.choice.tolist() == [0, 3, 0]
    assert arrays.bias_start.tolist() == [0, 0, 2, 2]
    assert arrays.bias_ids.tolist() == [4, 9]
    assert arrays.bias_values.tolist() == [-2.0, 1.5]
    assert arrays.index.tolist() == [0, 0, 0]
    plain.tokens.append(5)
    assert rows.arrays([plain, biased, plain]).index.tolist() == [1, 0, 1]
    assert rows.arrays([biased]).bias_start.tolist() == [0, 2]


def test_only_rows_with_penalties_have_a_history() -> None:
    rows = SamplingRows(2)
    penalised = sequence((5, 6, 5), SamplingParams(frequency_penalty=0.5, seed=1))
    plain = sequence((7, 7), SamplingParams(seed=1))

    def history() -> tuple[list[int], list[int], list[int]]:
        arrays = rows.arrays([plain, penalised])
        return (
            arrays.history_start.tolist(),
            arrays.history_ids.tolist(),
            arrays.history_counts.tolist(),
        )

    assert history() == ([0, 0, 2], [5, 6], [0, 0])
    penalised.tokens.extend([6, 8, 8])
    assert history() == ([0, 0, 3], [5, 6, 8], [0, 1, 2])
    rows.arrays([plain])
    penalised.tokens.append(5)
    assert history() == ([0, 0, 3], [5, 6, 8], [1, 1, 2])


def test_only_rows_that_are_restricted_now_have_a_mask() -> None:
    rows = SamplingRows(2)
    plain, ends = sequence((5,), SamplingParams(seed=1)), sequence((6,), SamplingParams(seed=1))
    words = sequence((7,), SamplingParams(bad_words=("a",), seed=1))
    request = replace(ends.request, params=SamplingParams(min_tokens=1), eos_ids=frozenset([0]))
    ends.aid(Restriction(request, fake_vocabulary(), None), None)
    words.aid(Restriction(words.request, fake_vocabulary(), None), None)
    arrays = rows.arrays([plain, ends, None, words])
    assert arrays.mask_rows.tolist() == [-1, 0, -1, 1]
    rows.fill_masks()
    masks = arrays.masks.reshape(2, 2)
    assert np.unpackbits(masks[0].view(np.uint8), bitorder="little")[:3].tolist() == [0, 1, 1]
    a = WORDS.index("a")
    assert np.unpackbits(masks[1].view(np.uint8), bitorder="little")[[0, a]].tolist() == [1, 0]
    assert ends.restriction is not None
    ends.restriction.take(9)
    assert rows.arrays([plain, ends, None, words]).mask_rows.tolist() == [-1, -1, -1, 0]
    before = arrays.masks.copy()
    assert rows.arrays([plain]).masks.size == 0
    rows.fill_masks()  # of nobody
    assert (arrays.masks == before).all()


def test_rows_for_logits_alone_are_greedy_and_have_no_penalties() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 1.0}, seed=1)
    asks = sequence((1, 2), params, prompt_logits=True)
    builder = BatchBuilder(LIMITS, n_groups=2, vocab=50)
    asks.blocks.tables[0].append(0)
    asks.blocks.tables[1].append(0)
    arrays = builder.build(Plan((Chunk(asks, 0, 2, 1),))).sampling
    assert arrays.temperature.tolist() == [0.0]
    assert arrays.history_ids.size == arrays.bias_ids.size == 0
