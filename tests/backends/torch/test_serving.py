"""The engine and the server with torch on the CPU, on a tiny random model."""

from __future__ import annotations

import json
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
from tests.server.real import HANG, RealServer, real_server

pytestmark = pytest.mark.torch

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
OPTIONS: Any = {"backend": "torch", "device": "cpu", "threads": 1, "ctx_size": 256}
MAX_TOKENS = 12
LONG = 40  # so long that sequences grow out of a small pool


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    options = ("--backend", "torch", "--device", "cpu", "--dtype", "float32", "--threads", "1")
    with real_server(TINY, *options, "--ctx-size", "256") as running:
        yield running


def complete(server: RealServer, **fields: Any) -> str:
    body = {"prompt": "abc", "max_tokens": MAX_TOKENS, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
def test_a_stream_is_the_whole_answer(server: RealServer, sampling: Any) -> None:
    body = {"prompt": "abc", "max_tokens": MAX_TOKENS, "stream": True, **sampling}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        for line in filter(None, answer.iter_lines()):
            if (data := line.removeprefix("data: ")) != "[DONE]":
                text += "".join(c["text"] for c in json.loads(data)["choices"])
    assert text
    assert text == complete(server, **sampling)


def test_a_client_that_leaves_frees_its_memory(server: RealServer) -> None:
    before = server.health()["generated_tokens"]
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 20, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        first_event(answer.iter_lines())
    while (report := server.health())["running"] or report["waiting"] or report["kv_usage"]:
        pass
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bytes_under_any_load(dtype: str) -> None:
    draw = np.random.default_rng(5)
    common = draw.integers(3, 120, 48).tolist()
    prompts = [
        [*common[: 16 * (i % 4)], *draw.integers(3, 120, 1 + 9 * i).tolist()] for i in range(8)
    ]
    params = [params_of(i) for i in range(len(prompts))]
    with LLM(TINY, dtype=dtype, prefix_cache=False, **OPTIONS) as llm:
        alone = [llm.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
        block_bytes = llm.ready.kv_bytes // sum(llm.ready.kv_blocks)
    assert all(len(ids) == LONG for ids in alone)
    with LLM(TINY, dtype=dtype, kv_cache_memory=17 * block_bytes, **OPTIONS) as llm:
        preempted = llm.generate(prompts, params)
        assert llm.stats.preemptions > 0
        assert [g.token_ids for g in preempted] == alone
    with LLM(TINY, dtype=dtype, max_num_batched_tokens=48, **OPTIONS) as llm:
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert llm.stats.prefix_hits > 0
