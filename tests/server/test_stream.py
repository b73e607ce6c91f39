"""Streamed answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from localllm.server import event_stream
from tests.server.fakes import Exchange, FakeEngine, events_of

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello", "max_tokens": 150}


async def stream(client: httpx.AsyncClient, url: str, **fields: Any) -> list[Any]:
    answer = await client.post(url, json={**BODY, "stream": True, **fields})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.content)


async def test_order_of_a_chat_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.say("Hi there")
    events = await stream(client, CHAT)
    assert events.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": " there"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert not any("usage" in chunk for chunk in events)


async def test_order_of_a_completion_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.say("Hi there")
    events = await stream(client, COMPLETIONS)
    assert events.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in events]
    assert [choice["text"] for choice in choices] == ["Hi", " there", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert {chunk["object"] for chunk in events} == {"text_completion"}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_usage_comes_last_and_only_when_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, url: str
) -> None:
    engine.say("Hi there")
    *chunks, last, done = await stream(client, url, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "語", ["👧 t", "zzz"], "no such thing"])
async def test_streamed_text_is_the_whole_text(
    client: httpx.AsyncClient, url: str, stop: str | list[str] | None
) -> None:
    whole = (await client.post(url, json={**BODY, "stop": stop})).json()["choices"][0]
    text, reason = "", None
    for chunk in (await stream(client, url, stop=stop))[:-1]:
        choice = chunk["choices"][0]
        text += choice["delta"].get("content", "") if url == CHAT else choice["text"]
        reason = choice["finish_reason"] or reason
    assert text == (whole["message"]["content"] if url == CHAT else whole["text"])
    assert reason == whole["finish_reason"]
    assert text
    assert "\ufffd" not in text


async def test_choices_are_told_apart_and_each_has_one_role(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("a b c", "", "x")
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in (await stream(client, CHAT, n=3))[:-1]:
        (choice,) = chunk["choices"]
        index = choice["index"]
        texts[index] += choice["delta"].get("content", "")
        roles[index] += "role" in choice["delta"]
        reasons[index] += choice["finish_reason"] == "stop"
    assert texts == ["a b c", "", "x"]
    assert roles == reasons == [1, 1, 1]


async def test_comments_keep_a_silent_stream_alive(
    app: FastAPI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEPALIVE_SECONDS", 0.01)
    engine.hold_after = 0
    async with Exchange(app, CHAT, {**BODY, "stream": True}) as exchange:
        assert await exchange.next_body() == b": ping\n\n"
        assert await exchange.next_body() == b": ping\n\n"
        assert exchange.status == 200
        engine.release()
        events = events_of(await exchange.rest())
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"


async def test_text_is_sent_as_it_comes(app: FastAPI, engine: FakeEngine) -> None:
    engine.say("one two")
    engine.hold_after = 1
    async with Exchange(app, COMPLETIONS, {**BODY, "stream": True}) as exchange:
        first = await exchange.next_body()
        assert first is not None
        assert events_of(first)[0]["choices"][0]["text"] == "one"


async def test_failure_in_mid_stream_is_an_error_event(app: FastAPI, engine: FakeEngine) -> None:
    engine.hold_after = 2
    async with Exchange(app, CHAT, {**BODY, "stream": True}) as exchange:
        assert await exchange.next_body()
        engine.fail("The engine died")
        *_, last = events_of(await exchange.rest())
    assert last == {
        "error": {
            "message": "The engine died",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    }


async def test_failure_before_the_first_event_has_a_status(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fail("The engine died")
    answer = await client.post(CHAT, json={**BODY, "stream": True})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "The engine died"
    assert answer.headers["x-should-retry"] == "false"


async def test_one_failed_choice_ends_the_others(app: FastAPI, engine: FakeEngine) -> None:
    engine.hold_after = 1
    async with Exchange(app, CHAT, {**BODY, "stream": True, "n": 3}) as exchange:
        assert await exchange.next_body()
        engine.fail("The engine died")
        assert "error" in events_of(await exchange.rest())[-1]
    assert not engine.live
