"""/metrics, and the timings in answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

import httpx
import psutil
import pytest
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from localllm.engine.messages import EngineStats
from localllm.engine.meter import TOKEN_BOUNDS, Histogram
from localllm.server.served_model import ServedModel
from localllm.server.service import Service
from tests.server.fakes import Exchange, FakeEngine, events_of

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PER_SEQUENCE = {
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
}


async def scrape(client: httpx.AsyncClient) -> dict[str, Metric]:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def values(metric: Metric, suffix: str = "") -> Iterator[tuple[Mapping[str, str], float]]:
    for sample in metric.samples:
        if sample.name == metric.name + suffix:
            yield sample.labels, sample.value


def value(metric: Metric, suffix: str = "", **labels: str) -> float:
    (found,) = [v for given, v in values(metric, suffix) if given.items() >= labels.items()]
    return found


async def test_an_answer_is_measured(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.say("one two three")
    body = {"messages": HELLO, "n": 2}
    usage = (await client.post(CHAT, json=body)).json()["usage"]
    metrics = await scrape(client)
    labels = {"model_name": "gpt2", "class": "default"}
    assert metrics.keys() >= PER_SEQUENCE
    for name in PER_SEQUENCE - {"vllm:inter_token_latency_seconds"}:
        assert value(metrics[name], "_count", **labels) == 2, name
    assert value(metrics["vllm:inter_token_latency_seconds"], "_count", **labels) == 6
    assert value(metrics["vllm:generation_tokens"], "_total", **labels) == 8
    assert value(metrics["vllm:request_generation_tokens"], "_sum", **labels) == 8
    assert value(metrics["vllm:prompt_tokens"], "_total", **labels) == 2 * usage["prompt_tokens"]
    assert value(metrics["vllm:request_success"], "_total", finished_reason="stop") == 2
    assert value(metrics["localllm:request_arrivals"], "_total", api="chat_completions") == 1
    buckets = [
        labels["le"] for labels, _ in values(metrics["vllm:time_to_first_token_seconds"], "_bucket")
    ]
    assert buckets[:4] == ["0.001", "0.005", "0.01", "0.02"]
    assert buckets[-2:] == ["2560.0", "+Inf"]


async def test_ends_are_told_apart(
    app: FastAPI, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("one two three four")
    await client.post(COMPLETIONS, json={"prompt": "x"})
    await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    for stream in (False, True):
        await client.post(COMPLETIONS, json={"prompt": "x", "stop": "two", "stream": stream})
    engine.hold_after = 1
    async with Exchange(app, COMPLETIONS, {"prompt": "x", "stream": True}) as exchange:
        await exchange.next_body()
    async with Exchange(app, COMPLETIONS, {"prompt": "x"}):
        while not engine.live:
            await asyncio.sleep(0)
    engine.fail("The engine died")
    await client.post(COMPLETIONS, json={"prompt": "x"})
    metrics = await scrape(client)
    ends = {
        labels["finished_reason"]: n
        for labels, n in values(metrics["vllm:request_success"], "_total")
    }
    assert ends == {"stop": 3, "length": 1, "abort": 2, "error": 1}
    phases = {
        labels["phase"]: n for labels, n in values(metrics["localllm:cancellations"], "_total")
    }
    assert phases == {"decode": 2}


async def test_the_engine_tells_of_itself(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Histogram(TOKEN_BOUNDS)
    for n in (1, 1, 9, 20_000):
        steps.add(n)
    stats = EngineStats(
        running=4,
        waiting=7,
        kv_usage=0.25,
        preemptions=2,
        prefix_queries=100,
        prefix_hits=64,
        alloc_failures=6,
        evictions=5,
        step_tokens=steps.tally(),
        step_seconds=(("run", Histogram((1.0,) * 13).tally()),),
    )
    monkeypatch.setattr(FakeEngine, "stats", stats)
    engine.restarts = 3
    metrics = await scrape(client)
    assert value(metrics["vllm:num_requests_running"], model_name="gpt2") == 4
    assert value(metrics["vllm:num_requests_waiting"]) == 7
    assert value(metrics["localllm:batch_occupancy"]) == 4 / 16
    assert value(metrics["vllm:kv_cache_usage_perc"]) == 0.25
    assert value(metrics["vllm:num_preemptions"], "_total") == 2
    assert value(metrics["vllm:prefix_cache_queries"], "_total") == 100
    assert value(metrics["vllm:prefix_cache_hits"], "_total") == 64
    assert value(metrics["localllm:kv_evictions"], "_total") == 5
    assert value(metrics["localllm:kv_alloc_failures"], "_total") == 6
    assert value(metrics["localllm:engine_restarts"], "_total") == 3
    tokens = metrics["vllm:iteration_tokens_total"]
    assert value(tokens, "_bucket", le="1.0") == 2
    assert value(tokens, "_bucket", le="16.0") == 3
    assert value(tokens, "_bucket", le="16384.0") == 3
    assert value(tokens, "_bucket", le="+Inf") == value(tokens, "_count") == 4
    assert value(tokens, "_sum") == 20_011
    assert value(metrics["localllm:model_loaded"], model_name="gpt2") == 1
    (build,) = [labels for labels, _ in values(metrics["localllm:build_info"])]
    assert build.keys() == {"version", "backend", "quant", "config_hash"}
    assert build["backend"] == "fake"


async def test_before_the_model_is_loaded(service: Service, app: FastAPI) -> None:
    service._model = None
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        metrics = await scrape(client)
    assert value(metrics["localllm:model_loaded"]) == 0


TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("usage", [False, True])
async def test_timings_stand_in_the_last_chunk(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, usage: bool
) -> None:
    engine.say("one two", "three")
    engine.cached_tokens = 1
    body = {
        **({"messages": HELLO} if url == CHAT else {"prompt": "a b c"}),
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": usage},
    }
    *chunks, last, _ = events_of((await client.post(url, json=body)).content)
    assert not any("timings" in chunk for chunk in chunks)
    timings = last["timings"]
    assert timings.keys() == TIMINGS
    assert timings["cache_n"] == 2
    assert timings["prompt_n"] == 2 * (len(engine.submitted[0].prompt) - 1)
    assert timings["predicted_n"] == 5
    assert timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] > 0
    whole = (await client.post(url, json={**body, "stream": False})).json()
    assert whole["timings"].keys() == TIMINGS


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_structure_and_cut_prompts(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel, stream: bool
) -> None:
    engine.context = 2000
    engine.say(CALL)
    calls = {"messages": HELLO, "tools": TOOLS, "stream": stream}
    assert (await client.post(CHAT, json={**calls, "n": 2})).status_code == 200
    cut = len(gpt2.tokenizer.encode(CALL[:-25]))
    assert (await client.post(CHAT, json={**calls, "max_tokens": cut})).status_code == 200
    engine.say("{}")
    structured = {"messages": HELLO, "response_format": {"type": "json_object"}, "stream": stream}
    assert (await client.post(CHAT, json={**structured, "n": 3})).status_code == 200
    assert (await client.post(CHAT, json={**structured, "max_tokens": 1})).status_code == 200
    long = {"prompt": [5] * 90, "truncate_prompt_tokens": 4, "stream": stream}
    assert (await client.post(COMPLETIONS, json=long)).status_code == 200
    metrics = await scrape(client)
    assert value(metrics["localllm:tool_calls"], "_total", parsed="true") == 2
    assert value(metrics["localllm:tool_calls"], "_total", parsed="false") == 1
    assert value(metrics["localllm:structured_outputs"], "_total", valid="true") == 3
    assert value(metrics["localllm:structured_outputs"], "_total", valid="false") == 1
    assert value(metrics["localllm:context_truncations"], "_total") == 1


async def test_a_processor_tells_its_load_and_memory(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert "localllm:device_utilization" not in await scrape(client), "of a device unknown here"
    assert engine.ready is not None
    engine.ready = replace(engine.ready, backend="cpu", device="a processor")
    metrics = await scrape(client)
    assert 0 <= value(metrics["localllm:device_utilization"], device="a processor") <= 1
    memory = metrics["localllm:device_memory_bytes"]
    assert value(memory, kind="total") == psutil.virtual_memory().total
    assert 0 < value(memory, kind="available") < value(memory, kind="total")
