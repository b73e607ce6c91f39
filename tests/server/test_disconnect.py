"""A client that leaves frees what its request held, at once."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI

from localllm.server.service import Service
from tests.server.fakes import Exchange, FakeEngine

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "Hello"}], "prompt": ["Hello", "you"]}
HANG = 20


async def submitted(engine: FakeEngine) -> None:
    while not engine.live:
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_leaving_cancels_every_choice(
    app: FastAPI, engine: FakeEngine, service: Service, stream: bool, url: str, hold_after: int
) -> None:
    engine.hold_after = hold_after
    async with asyncio.timeout(HANG):
        async with Exchange(app, url, {**BODY, "n": 2, "stream": stream}) as exchange:
            await submitted(engine)
            if stream and hold_after:
                assert await exchange.next_body()
            exchange.hang_up()
            await engine.cancel_seen.wait()
    assert sorted(engine.cancelled) == sorted(s.sequence_id for s in engine.submitted)
    assert not engine.live
    assert service.open_requests == 0


async def test_leaving_before_the_prompt_is_ready_submits_nothing_for_long(
    app: FastAPI, engine: FakeEngine
) -> None:
    engine.hold_after = 0
    async with asyncio.timeout(HANG):
        async with Exchange(app, "/v1/completions", BODY) as exchange:
            exchange.hang_up()
    assert not engine.live
    assert len(engine.cancelled) == len(engine.submitted)


async def test_an_answer_that_ended_cancels_nothing(app: FastAPI, engine: FakeEngine) -> None:
    async with Exchange(app, "/v1/completions", {**BODY, "stream": True}) as exchange:
        await exchange.rest()
    assert engine.cancelled == []
