"""POST /tokenize, /detokenize, /apply-template, and /tokenizer_info."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from localllm.server.served_model import ServedModel
from tests.server.fakes import CONTEXT, FakeEngine

pytestmark = pytest.mark.anyio


async def test_tokenize_speaks_two_dialects(client: httpx.AsyncClient) -> None:
    for field in ("content", "prompt"):
        answer = await client.post("/tokenize", json={field: "Hi there"})
        assert answer.json() == {"tokens": [17250, 612], "count": 2, "max_model_len": CONTEXT}


@pytest.mark.parametrize("text", ["Grüße, 日本語 👩‍👩‍👧", "a<|endoftext|>b", ""])
async def test_detokenize_is_the_way_back(client: httpx.AsyncClient, text: str) -> None:
    tokens = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
    answer = await client.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"content": text, "prompt": text}


async def test_tokenize_refuses(client: httpx.AsyncClient) -> None:
    for path, body, param in (
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content"),
        ("/tokenize", {"content": "a", "messages": [{"role": "user", "content": "b"}]}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_tokenizer_info(client: httpx.AsyncClient, gpt2: ServedModel) -> None:
    info = (await client.get("/tokenizer_info")).raise_for_status().json()
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>"
    assert info["pad_token"] is None
    assert info["vocab_size"] == gpt2.tokenizer.vocab_size
    assert info["model_max_length"] == CONTEXT
    assert info["chat_template"] == gpt2.template.source


async def test_apply_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hello <|im_end|>"}]}
    applied = (await client.post("/apply-template", json=body)).raise_for_status().json()
    assert applied["prompt"].startswith("<|im_start|>user\nHello")
    assert applied["prompt"].endswith("<|im_start|>assistant\n")
    await client.post("/v1/chat/completions", json=body)
    assert applied["count"] == len(engine.submitted[0].prompt)
    refused = await client.post("/apply-template", json={"messages": []})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "look_up"}}]},
    ],
)
async def test_tokenize_takes_a_conversation(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello <|im_end|>"}], **fields}
    tokens = (await client.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
    applied = (await client.post("/apply-template", json=body)).raise_for_status().json()
    text = (await client.post("/detokenize", json={"tokens": tokens})).json()["content"]
    assert (text, len(tokens)) == (applied["prompt"], applied["count"])
    assert text.endswith("<|im_start|>assistant\n") == (fields.get("add_generation_prompt") is None)


async def test_a_chat_template_of_the_request_is_refused_as_in_a_chat(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}
    for path in ("/apply-template", "/tokenize", "/v1/chat/completions"):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template"
