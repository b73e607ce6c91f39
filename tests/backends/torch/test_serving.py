"""The engine and the server with torch on the CPU, on a tiny random model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

from localllm import LLM
from localllm.sampling_params import SamplingParams
from tests.helpers import FIXTURES
from tests.server.fakes import first_event
from tests.server.real import HANG, MAX_TOKENS, RealServer, complete, real_server, streamed

pytestmark = pytest.mark.torch

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
OPTIONS: Any = {"backend": "torch", "device": "cpu", "threads": 1, "ctx_size": 256}
LONG = 40  # so long that sequences grow out of a small pool


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    options = ("--backend", "torch", "--device", "cpu", "--dtype", "float32", "--threads", "1")
    with real_server(TINY, *options, "--ctx-size", "256") as running:
        yield running


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
def test_a_stream_is_the_whole_answer(server: RealServer, sampling: Any) -> None:
    text = streamed(server, **sampling)
    assert text
    assert text == complete(server, **sampling)


def test_a_chat_is_streamed_and_counted(server: RealServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    url, events = f"{server.url}/v1/chat/completions", []
    with httpx.stream("POST", url, json=body, timeout=HANG) as answer:
        for line in filter(None, answer.iter_lines()):
            events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"]["completion_tokens"] == MAX_TOKENS
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    assert len(chunks) > 2


def test_a_client_that_leaves_disturbs_no_one(server: RealServer) -> None:
    """What it had is freed, what it would have got is not computed, others get their bytes."""
    other = {"prompt": "xyz", "max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 3}
    expected = complete(server, **other)
    before = server.health()["generated_tokens"]
    answers: list[str] = []
    beside = threading.Thread(target=lambda: answers.append(complete(server, **other)))
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 20, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        lines = answer.iter_lines()
        first_event(lines)
        beside.start()
        first_event(lines)
    beside.join()
    assert answers == [expected]
    deadline = time.monotonic() + HANG
    while (report := server.health())["running"] or report["waiting"] or report["kv_usage"]:
        assert time.monotonic() < deadline, report
    assert server.health()["generated_tokens"] - before < 20 * 200


def test_health_tells_the_device(server: RealServer) -> None:
    report = server.health()
    assert report["backend"] == "torch"
    assert "on cpu, float32, 1 thread" in report["device"]


def test_a_grammar_holds(server: RealServer) -> None:
    assert complete(server, guided_choice=["yes", "no"], max_tokens=20) in ("yes", "no")


def params_of(index: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=40,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        seed=1000 + index,
        max_tokens=LONG,
        ignore_eos=True,
    )


def test_a_cache_in_q8_0_is_told() -> None:
    with LLM(TINY, kv_cache_dtype="q8_0", **OPTIONS) as llm:
        assert "float32, KV cache in q8_0" in llm.ready.device
        small = llm.ready.kv_bytes // sum(llm.ready.kv_blocks)
    with LLM(TINY, **OPTIONS) as llm:
        assert "q8_0" not in llm.ready.device
        assert llm.ready.kv_bytes // sum(llm.ready.kv_blocks) * 34 == small * 32 * 4


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "q8_0")],
)
def test_the_same_bytes_under_any_load(dtype: str, kv_cache_dtype: str) -> None:
    options = {**OPTIONS, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    draw = np.random.default_rng(5)
    common = draw.integers(3, 120, 48).tolist()
    prompts = [
        [*common[: 16 * (i % 4)], *draw.integers(3, 120, 1 + 9 * i).tolist()] for i in range(8)
    ]
    params = [params_of(i) for i in range(len(prompts))]
    with LLM(TINY, prefix_cache=False, **options) as llm:
        alone = [llm.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
        block_bytes = llm.ready.kv_bytes // sum(llm.ready.kv_blocks)
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert llm.stats.preemptions == llm.stats.prefix_hits == 0
    assert all(len(ids) == LONG for ids in alone)
    assert len({tuple(ids) for ids in alone}) > 4
    with LLM(TINY, kv_cache_memory=17 * block_bytes, **options) as llm:
        preempted = llm.generate(prompts, params)
        assert llm.stats.preemptions > 0
        assert [g.token_ids for g in preempted] == alone
    with LLM(TINY, max_num_batched_tokens=48, **options) as llm:
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        warm = llm.generate(prompts, params)
        assert [g.token_ids for g in warm] == alone
        assert all(
            g.cached_tokens >= (len(p) - 1) // 16 * 16 for g, p in zip(warm, prompts, strict=True)
        )
