"""The same bytes under any load: an answer depends on its prompt, parameters and seed alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import LLM, Generation, SamplingParams
from tests.helpers import architecture_cases

N_PROMPTS = 24
TEXT = (
    "The lighthouse keeper counted the ships that passed in the night and wrote each of them into "
    "a book: where it came from, where it went, and what he thought that it carried. When the fog "
    "came in, he rang the bell once a minute and listened for an answer. Most nights there was "
    "none. In the spring the book was full, so he began a second one, and then he noticed that "
    "some of the ships had only ever been seen by him."
)


def params_of(index: int, max_tokens: int) -> SamplingParams:
    """Every second one is greedy; the others use a seed, filters and penalties."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=40 if index % 3 else 0,
        presence_penalty=0.5 if index % 4 == 1 else 0.0,
        repetition_penalty=1.1 if index % 6 == 3 else 1.0,
        seed=1000 + index,
        max_tokens=max_tokens,
        ignore_eos=True,
    )


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    with LLM(model, backend="cpu", ctx_size=256, **options) as llm:
        yield llm


def tokens(generations: Sequence[Generation]) -> list[tuple[list[int], str]]:
    return [(g.token_ids, g.text) for g in generations]


def check_same_bytes(model: Path, prompts: Sequence[str | list[int]], max_tokens: int) -> None:
    params = [params_of(i, max_tokens) for i in range(len(prompts))]
    with engine(model, prefix_cache=False) as llm:
        alone = [llm.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params)
        cache_bytes = llm.ready.kv_bytes
        assert llm.stats.preemptions == 0
        assert llm.stats.prefix_hits == 0
    assert all(len(g.token_ids) == max_tokens for g in alone)
    assert all(g.text for g in alone)
    assert tokens(together) == tokens(alone)
    with engine(model, prefix_cache=False, max_num_batched_tokens=48) as llm:
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
    with engine(model, kv_cache_memory=cache_bytes // 8) as llm:  # two contexts for 16 sequences
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
        assert llm.stats.preemptions > 0
    with engine(model, kv_cache_memory=cache_bytes) as llm:
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
        warm = llm.generate(prompts, params)
        assert tokens(warm) == tokens(alone)
        assert all(g.cached_tokens >= (len(g.prompt_token_ids) - 1) // 16 * 16 for g in warm)
        assert llm.stats.prefix_hits > 0


def check_same_logits(model: Path, token_ids: list[int]) -> None:
    with engine(model, prefix_cache=False) as llm:
        whole = llm.logits(token_ids)
        companion = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        others = [token_ids[i:] for i in range(1, 9)]
        beside = threading.Thread(target=llm.generate, args=(others, companion))
        beside.start()
        in_company = llm.logits(token_ids)
        beside.join()
    assert whole.shape == (len(token_ids), llm.ready.vocab_size)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(in_company, whole)
    for chunk in (7, 48):
        with engine(model, max_num_batched_tokens=chunk) as llm:
            np.testing.assert_array_equal(llm.logits(token_ids), whole)


@pytest.mark.model
def test_same_bytes_of_a_real_model(smollm2: Path) -> None:
    words = TEXT.split()
    prompts = [" ".join(words[i % 5 :][: 3 + i * 3]) for i in range(N_PROMPTS)]
    check_same_bytes(smollm2, prompts, max_tokens=24)


@pytest.mark.model
def test_same_logits_of_a_real_model(smollm2: Path) -> None:
    check_same_logits(smollm2, list(range(1000, 1100)))


TINY = architecture_cases("llama-format-q4_k_s", "gemma3-dense")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_same_bytes_of_tiny_models(case: Any) -> None:
    draw = np.random.default_rng(5)
    common = draw.integers(3, 120, 64).tolist()
    prompts = [
        [*common[: 16 * (i % 5)], *draw.integers(3, 120, 1 + 4 * i).tolist()]
        for i in range(N_PROMPTS)
    ]
    check_same_bytes(case.gguf, prompts, max_tokens=40)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_same_logits_of_tiny_models(case: Any) -> None:
    check_same_logits(case.gguf, np.random.default_rng(6).integers(3, 120, 120).tolist())
