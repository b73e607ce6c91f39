"""Models, health and the page."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fakes import CONTEXT, Exchange, FakeEngine

pytestmark = pytest.mark.anyio


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).raise_for_status().json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == "gpt2"
    assert card["object"] == "model"
    assert card["max_model_len"] == card["context_length"] == card["meta"]["n_ctx"] == CONTEXT
    assert card["meta"]["n_vocab"] == 50257
    assert (await client.get("/models")).json() == listed
    assert card["quantization"]
    assert card["capabilities"]["chat"] is True
    details = (await client.get("/v1/models/gpt2")).json()
    assert details.items() >= card.items()
    assert (await client.get("/models/gpt2")).json() == details
    assert details["device"] == "no device at all"
    assert details["eos_token"] == "<|endoftext|>"
    assert "messages" in details["chat_template"]
    assert details["max_num_seqs"] == 16


@pytest.mark.parametrize("name", ["other", "a/b", "gpt2/"])
async def test_no_other_model(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_health(app: FastAPI, client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.hold_after = 0
    engine.preemptions = 3
    async with Exchange(app, "/v1/completions", {"prompt": "Hello"}):
        while not engine.live:
            await asyncio.sleep(0)
        busy = await client.get("/health")
    assert busy.status_code == 200
    report = busy.json()
    assert report["status"] == "ok"
    assert report["model"] == "gpt2"
    assert report["device"] == "no device at all"
    assert report["running"] == 1
    assert report["kv_usage"] == 0.01
    assert report["preemptions"] == 3
    assert report["uptime_seconds"] >= 0
    assert report["version"]
    idle = (await client.get("/health")).json()
    assert (idle["running"], idle["kv_usage"]) == (0, 0.0)


async def test_page(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "v1/chat/completions" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org", "")  # nothing from elsewhere
    assert "https://" not in page.text
    head = await client.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_openapi_names_every_endpoint(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).raise_for_status().json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= paths.keys()


@pytest.mark.parametrize(
    "path", ["/health", "/models", "/v1/models", "/v1/models/gpt2", "/models/gpt2"]
)
async def test_head_answers_as_get(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200


async def test_no_page_depends_on_other_hosts(client: httpx.AsyncClient) -> None:
    """The usual ones for the schema do; the schema itself is served."""
    for path in ("/docs", "/redoc"):
        assert (await client.get(path)).status_code == 404
    schema = (await client.get("/openapi.json")).raise_for_status().json()
    assert "/v1/models" in schema["paths"]
