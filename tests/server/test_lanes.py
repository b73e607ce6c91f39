"""Long texts beside short ones."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from localllm.config import HttpConfig
from localllm.server.app import create_app
from localllm.server.lanes import Lanes
from localllm.server.service import Service
from tests.server.fakes import CONTEXT, FakeEngine

pytestmark = pytest.mark.anyio

HANG = 60
CHAT = "/v1/chat/completions"
LONG = "some words " * 300_000


def saying(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def app(service: Service) -> FastAPI:
    return create_app(service, HttpConfig())


@pytest.mark.parametrize("longer", [2**16, 2**24])
async def test_a_short_request_does_not_wait_for_long_ones(longer: int) -> None:
    lanes = Lanes()
    hold, begun = threading.Event(), threading.Semaphore(0)

    def held() -> None:
        begun.release()
        hold.wait(HANG)

    try:
        waiting = [asyncio.create_task(lanes.of(longer).run(held)) for _ in range(5)]
        await asyncio.to_thread(begun.acquire)
        async with asyncio.timeout(HANG):
            assert await lanes.of(1000).run(lambda: "overtakes") == "overtakes"
        assert not any(task.done() for task in waiting)
    finally:
        hold.set()
    await asyncio.gather(*waiting)
    lanes.close()


async def test_a_chat_is_answered_while_a_long_text_is_worked_on(
    client: httpx.AsyncClient, service: Service, engine: FakeEngine
) -> None:
    hold, begun = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        hold.wait(HANG)

    long = asyncio.create_task(service.lanes.of(len(LONG)).run(held))
    await asyncio.to_thread(begun.wait, HANG)
    try:
        overlong = asyncio.create_task(client.post(CHAT, json={"messages": saying(LONG)}))
        engine.say("Yes")
        async with asyncio.timeout(HANG):
            answer = await client.post(CHAT, json={"messages": saying("There?")})
        assert answer.json()["choices"][0]["message"]["content"] == "Yes"
        assert not overlong.done()
    finally:
        hold.set()
    await long
    assert (await overlong).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": saying(LONG)}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["short", LONG]}, "prompt"),
    ],
)
async def test_far_too_long_is_said_without_counting(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, object], param: str
) -> None:
    error = (await client.post(path, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"with over {CONTEXT} tokens it exceeds the context window" in error["message"]
    assert not engine.submitted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": LONG}, "content"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": saying(LONG)}, "messages"),
        ("/apply-template", {"messages": saying(LONG)}, "messages"),
        (CHAT, {"messages": saying(LONG), "truncate_prompt_tokens": 5}, "messages"),
    ],
)
async def test_what_has_no_context_has_a_limit(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("string_above_max_length", param)
