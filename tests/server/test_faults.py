"""Faults that users of other servers report again and again, by their number in the list of them.

Others of that list have their tests where what they are about is tested: 15 and 19 to 23 in
`test_faults_of_files.py`, 17 in `tests/scripts/test_canary_fuzz.py`, 30 in `test_access.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from tests.helpers import FIXTURES
from tests.server.fakes import CONTEXT, Exchange, FakeEngine, events_of, first_event
from tests.server.real import HANG, RealServer, real_server

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(TINY) as running:
        yield running


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[str]:
    """The texts of a stream's chunks."""
    body = {"prompt": "x", "max_tokens": 200, "stream": True, **fields}
    answer = await client.post(COMPLETIONS, json=body)
    *chunks, done = events_of(answer.raise_for_status().content)
    assert done == "[DONE]"
    return [chunk["choices"][0]["text"] for chunk in chunks]


@pytest.mark.anyio
async def test_fault_10_characters_are_whole_in_every_chunk(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("日本語 👩‍👩‍👧 Grüße")
    texts = await streamed(client)
    assert "".join(texts) == "日本語 👩‍👩‍👧 Grüße"
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) > 5, "only what is incomplete is held back"


@pytest.mark.anyio
async def test_fault_10_an_incomplete_end_is_flushed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("ok 語")
    texts = await streamed(client, max_tokens=2)
    assert "".join(texts) == "ok \ufffd"


@pytest.mark.anyio
async def test_fault_11_only_the_beginning_of_a_stop_string_is_held(
    app: FastAPI, engine: FakeEngine
) -> None:
    engine.say("one two three END four")
    engine.hold_after = 3
    body = {"prompt": "x", "max_tokens": 50, "stream": True, "stop": [" three END"]}
    async with Exchange(app, COMPLETIONS, body) as exchange:
        shown = b"".join([await exchange.next_body() or b"" for _ in range(2)])
        assert [c["choices"][0]["text"] for c in events_of(shown)] == ["one", " two"]
        engine.release()
        rest = events_of(await exchange.rest())
    assert "".join(chunk["choices"][0]["text"] for chunk in rest[:-1]) == ""
    assert rest[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.anyio
async def test_fault_12_nothing_is_cut_in_silence(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["context_length"] == CONTEXT
    long = {"prompt": [5] * CONTEXT, "max_tokens": 3}
    refused = await client.post(COMPLETIONS, json=long)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "exceeds the context window" in refused.json()["error"]["message"]
    cut = await client.post(COMPLETIONS, json={**long, "truncate_prompt_tokens": 50})
    assert cut.headers["x-localllm-truncated-tokens"] == str(CONTEXT - 50)
    assert len(engine.submitted[-1].prompt) == 50


def test_fault_13_the_context_is_not_shared_out(server: RealServer) -> None:
    context = server.health()["context_length"]
    with ExitStack() as stack:
        for _ in range(6):
            body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
            answer = stack.enter_context(
                httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body, timeout=HANG)
            )
            first_event(answer.iter_lines())
        whole = {"prompt": [5] * (context - 4), "ignore_eos": True, "max_tokens": 10}
        answer = httpx.post(f"{server.url}{COMPLETIONS}", json=whole, timeout=HANG)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_fault_18_a_client_that_leaves_ends_its_prefill(server: RealServer) -> None:
    """Whole answers too. (In mid-stream: `test_real.py`; every choice: `test_disconnect.py`.)"""
    prompts = [[1 + (i * 7 + j) % 90 for j in range(250)] for i in range(60)]
    body = {"prompt": prompts, "max_tokens": 1}
    done = server.health()["prompt_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=httpx.Timeout(HANG, read=0.05))
    while (report := server.health())["running"] or report["waiting"] or report["kv_usage"]:
        pass
    assert report["prompt_tokens"] - done < 60 * 250


def test_fault_20_and_27_a_dead_engine_is_told_and_workers_die_with_the_server() -> None:
    with real_server(TINY, "--backend", "reference") as server:
        first = server.engine_process()
        first.kill()
        seen = set()
        while (report := server.health())["status"] != "ok" or "unavailable" not in seen:
            seen.add(report["status"])
        second = server.engine_process()
        assert second.pid != first.pid
        server.process.kill()
        psutil.wait_procs([second], timeout=HANG)
        assert not second.is_running()


def test_fault_26_ready_means_warmed_up(server: RealServer) -> None:
    httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "abc"}, timeout=HANG)
    (ready,) = [i for i, line in enumerate(server.log) if line.startswith("Ready: ")]
    assert not [line for line in server.log[ready:] if "compil" in line]


def test_fault_28_the_device_is_told(server: RealServer) -> None:
    report = server.health()
    assert report["backend"] == "cpu"
    assert report["device"] in "".join(server.log)


@pytest.mark.anyio
async def test_fault_29_usage_comes_only_when_asked_for(client: httpx.AsyncClient) -> None:
    for options in (None, {}, {"include_usage": False}):
        body = {"prompt": "x", "stream": True, "stream_options": options}
        content = (await client.post(COMPLETIONS, json=body)).content
        assert b'"usage"' not in content
        assert all(chunk["choices"] for chunk in events_of(content)[:-1])
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events_of((await client.post(COMPLETIONS, json=body)).content)
    assert (last["choices"], json.dumps(last["usage"])[0]) == ([], "{")
