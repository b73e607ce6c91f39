"""Every failure has OpenAI's envelope, a request id, and the right status."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from localllm.errors import GGUFError
from localllm.server.app import create_app
from localllm.server.served_model import ServedModel
from localllm.server.service import Service
from localllm.text.chat_template import ChatTemplate
from tests.server.fakes import MAX_BODY_BYTES, Exchange, FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, after checking what all errors have in common."""
    (error,) = answer.json().values()
    assert list(answer.json()) == ["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["message"]
    assert "\n" not in error["message"]
    assert answer.headers["x-request-id"]
    return dict(error)


async def test_unknown_url(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "unknown_url"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_a_slash_too_many_is_an_unknown_url(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(f"{path}/", json={"messages": HELLO, "prompt": "x"})
    assert answer.status_code == 404
    assert f"POST {path}/" in error_of(answer)["message"]


@pytest.mark.parametrize(("old", "new"), [("functions", "tools"), ("function_call", "tool_choice")])
async def test_what_is_outdated_is_refused_with_its_successor(
    client: httpx.AsyncClient, old: str, new: str
) -> None:
    answer = await client.post(CHAT, json={"messages": HELLO, old: {"name": "f"}})
    assert answer.status_code == 400
    assert f"{old} is not supported by this server: send {new}," in error_of(answer)["message"]


async def test_wrong_method(client: httpx.AsyncClient) -> None:
    answer = await client.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b"[1]", b'"x"', b"null", b"[" * 50_000])
async def test_a_body_that_is_no_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 50_000, "nested too deeply"),
        (b'{"model": "\xff"}', "not valid UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number with too many digits"),
    ],
)
async def test_what_is_wrong_with_an_unreadable_body_is_said(
    client: httpx.AsyncClient, body: bytes, message: str
) -> None:
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_does_not_say_it_is_json(client: httpx.AsyncClient, kind: str) -> None:
    """So that no page of the web can make a browser post here without asking first."""
    answer = await client.post(CHAT, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"tools": "hammer"}, "tools"),
    ],
    ids=repr,
)
async def test_bad_values_name_the_parameter(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(CHAT, json={"messages": HELLO, **fields})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert not engine.submitted


async def test_not_a_number_is_refused(client: httpx.AsyncClient) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "temperature"


async def test_the_templates_own_refusal_is_quoted(engine: FakeEngine, gpt2: ServedModel) -> None:
    source = "{{ raise_exception('I will not say ' + messages[0].content) }}"
    template = ChatTemplate({"default": source}, gpt2.tokenizer)
    service = Service(engine, lambda: replace(gpt2, template=template))
    await service.load()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 400
    assert "I will not say Hello" in error_of(answer)["message"]
    await service.close()


async def test_a_body_too_long_is_not_read(app: FastAPI) -> None:
    headers = {"content-length": str(MAX_BODY_BYTES + 1)}
    async with Exchange(app, CHAT, b"", headers) as exchange:
        await exchange.rest()
        assert exchange.unread == 1
    assert exchange.status == 413
    assert exchange.headers["connection"] == "close"


async def test_a_body_that_turns_out_too_long(app: FastAPI) -> None:
    async with Exchange(app, CHAT, b" " * (MAX_BODY_BYTES + 1)) as exchange:
        await exchange.rest()
    assert exchange.status == 413


async def test_loading(engine: FakeEngine, gpt2: ServedModel) -> None:
    engine.loadable.clear()
    service = Service(engine, lambda: gpt2)
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        loading = asyncio.create_task(service.load())
        for path in ("/v1/models", "/models", "/v1/models/gpt2"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert error_of(answer)["code"] == "loading"
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 503
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert (await client.get("/")).status_code == 200
        engine.loadable.set()
        await loading
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 200
    await service.close()


async def test_a_model_that_cannot_be_loaded(engine: FakeEngine, gpt2: ServedModel) -> None:
    engine.load_error = GGUFError("broken")
    service = Service(engine, lambda: gpt2)
    with pytest.raises(GGUFError, match="broken"):
        await service.load()
    assert service.health().status == "failed"
    await service.close()


async def test_draining(client: httpx.AsyncClient, service: Service) -> None:
    service.draining = True
    answer = await client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "draining"
    assert int(answer.headers["retry-after"]) > 0
    assert (await client.get("/health")).json()["status"] == "draining"


async def test_engine_that_does_not_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.healthy = False
    answer = await client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_unavailable"
    assert not engine.submitted
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")


async def test_engine_that_is_down_for_good(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.healthy, engine.failed = False, "The engine crashed too often"
    answer = await client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_unavailable"
    assert error_of(answer)["message"] == "The engine crashed too often. Restart the server"
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert health.json()["detail"] == error_of(answer)["message"]


@pytest.mark.parametrize("n", [1, 2])
async def test_engine_that_fails(client: httpx.AsyncClient, engine: FakeEngine, n: int) -> None:
    engine.fail("The engine died")
    answer = await client.post(CHAT, json={"messages": HELLO, "n": n})
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["type"] == "server_error"
    assert error["code"] == "engine_error"
    assert answer.headers["x-should-retry"] == "false"


async def test_a_fault_of_ours_tells_nothing_but_its_id(
    client: httpx.AsyncClient,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def context() -> int:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(service, "context", context)
    answer = await client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert error_of(answer)["code"] == "internal_error"
    assert answer.headers["x-request-id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_request_ids(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "localllm.server")
    answers = [await client.get("/v1/models") for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[0] != ids[1]
    assert all(f"{id} GET /v1/models: 200" in caplog.text for id in ids)
    given = await client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    evil = await client.get("/v1/models", headers={"x-request-id": "a b\tc"})
    assert evil.headers["x-request-id"] != "a b\tc"


async def test_a_path_cannot_forge_log_lines(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "localllm.server")
    await client.get("/x%0Areq_forged%20GET")
    assert all("\n" not in record.getMessage() for record in caplog.records)
    assert "req_forged" in caplog.text
