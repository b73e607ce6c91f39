"""Full queues, long waits, long answers and slow bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from localllm.config import HttpConfig
from localllm.server import middleware
from localllm.server.app import create_app
from localllm.server.auth import KeyRing
from localllm.server.protocol.base import MAX_MESSAGES, MAX_TOKEN_IDS
from localllm.server.service import Service
from tests.server.fakes import Exchange, FakeEngine, events_of

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 150}
HANG = 20


def app_of(service: Service, **limits: Any) -> FastAPI:
    return create_app(service, HttpConfig(**limits), KeyRing(), max_running=1)


@asynccontextmanager
async def waiting(app: FastAPI, engine: FakeEngine, n: int) -> AsyncIterator[list[Exchange]]:
    """n requests that the engine has taken and does not answer."""
    engine.hold_after = 0
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(Exchange(app, COMPLETIONS, BODY)) for _ in range(n)]
        while len(engine.live) < n:
            await asyncio.sleep(0)
        yield held


async def test_a_full_queue_refuses_before_the_body_is_read(
    service: Service, engine: FakeEngine
) -> None:
    app = app_of(service, max_queue=2)
    async with asyncio.timeout(HANG), waiting(app, engine, 3) as held:
        async with Exchange(app, COMPLETIONS, b"not even JSON") as refused:
            body = await refused.rest()
            assert refused.unread == 1
        assert refused.status == 429
        assert b'"code":"queue_full"' in body
        assert int(refused.headers["retry-after"]) >= 1
        assert len(engine.submitted) == 3
        engine.release()
        for exchange in held:
            assert b"text_completion" in await exchange.rest()
        async with Exchange(app, COMPLETIONS, BODY) as again:
            await again.rest()
        assert again.status == 200


async def test_those_who_leave_make_room(service: Service, engine: FakeEngine) -> None:
    app = app_of(service, max_queue=0)
    async with asyncio.timeout(HANG):
        async with waiting(app, engine, 1):
            pass
        async with waiting(app, engine, 1):
            pass
        engine.release()
        for body in ({"prompt": 3}, {"prompt": [10**9]}, b"{"):  # as do those who ask nonsense
            async with Exchange(app, COMPLETIONS, body) as exchange:
                await exchange.rest()
            assert exchange.status == 400
    assert app.state.admission._gate.inside == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_wait_for_the_first_step(
    service: Service, engine: FakeEngine, stream: bool
) -> None:
    engine.hold_after = 0
    app = app_of(service, queue_timeout=0.05)
    async with asyncio.timeout(HANG):
        async with Exchange(app, COMPLETIONS, {**BODY, "n": 3, "stream": stream}) as exchange:
            body = await exchange.rest()
    assert exchange.status == 503
    assert b"queue_timeout" in body
    assert int(exchange.headers["retry-after"]) >= 1
    assert not engine.live
    assert set(engine.cancelled) == {one.sequence_id for one in engine.submitted}


async def test_who_has_begun_waits_no_more(service: Service, engine: FakeEngine) -> None:
    engine.hold_after = 1
    app = app_of(service, queue_timeout=0.05)
    async with asyncio.timeout(HANG):
        async with Exchange(app, COMPLETIONS, {**BODY, "stream": True}) as exchange:
            await exchange.next_body()
            await asyncio.sleep(0.2)
            engine.release()
            assert events_of(await exchange.rest())[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_an_answer(service: Service, engine: FakeEngine, stream: bool) -> None:
    engine.hold_after = 2
    app = app_of(service, request_timeout=0.05)
    async with asyncio.timeout(HANG):
        async with Exchange(app, COMPLETIONS, {**BODY, "stream": stream}) as exchange:
            body = await exchange.rest()
    assert exchange.status == (200 if stream else 504)
    if stream:
        assert events_of(body)[-1]["error"]["code"] == "request_timeout"
    else:
        assert exchange.headers["x-should-retry"] == "false"
    assert not engine.live


async def test_a_body_that_does_not_come(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    async with asyncio.timeout(HANG):
        async with Exchange(app, COMPLETIONS, None) as exchange:
            body = await exchange.rest()
    assert exchange.status == 408
    assert b"body_timeout" in body
    assert exchange.headers["connection"] == "close"
    assert not engine.submitted


async def test_metrics_count_what_was_refused(service: Service, engine: FakeEngine) -> None:
    app = app_of(service, max_queue=0, request_timeout=30)
    transport = httpx.ASGITransport(app)
    async with (
        asyncio.timeout(HANG),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        async with waiting(app, engine, 1):
            assert (await client.post(COMPLETIONS, json=BODY)).status_code == 429
        assert (await client.post(COMPLETIONS, json={**BODY, "n": 0})).status_code == 400
        assert (await client.get("/nowhere")).status_code == 404
        text = (await client.get("/metrics")).text
    assert 'localllm:rejected_total{code="429",reason="queue_full"} 1.0' in text
    assert 'localllm:rejected_total{code="400",reason="invalid_request_error"} 1.0' in text
    assert 'localllm:rejected_total{code="404",reason="unknown_url"} 1.0' in text
    assert 'localllm:cancellations_total{phase="queue"} 1.0' in text
    assert 'localllm:request_arrivals_total{api="completions",class="default"} 3.0' in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [1] * (MAX_TOKEN_IDS + 1)}, "tokens"),
        (COMPLETIONS, {"prompt": [1] * (MAX_TOKEN_IDS + 1)}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)},
            "messages",
        ),
    ],
)
async def test_lists_have_an_end(service: Service, path: str, body: Any, param: str) -> None:
    async with Exchange(app_of(service), path, body) as exchange:
        answer = json.loads(await exchange.rest())
    assert exchange.status == 400
    assert answer["error"]["param"].startswith(param)
    assert len(answer["error"]["message"]) < 1000
