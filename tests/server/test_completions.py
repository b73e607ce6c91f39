"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from localllm.server.served_model import ServedModel
from tests.server.fakes import CONTEXT, FakeEngine

pytestmark = pytest.mark.anyio


async def complete(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": prompt, **fields})


async def test_answer_has_openais_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.say(" there")
    answer = (await complete(client, "Hi")).raise_for_status().json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "gpt2"
    assert answer["choices"] == [
        {"index": 0, "text": " there", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["total_tokens"] == 3


async def test_sixteen_tokens_unless_told(client: httpx.AsyncClient) -> None:
    answer = (await complete(client, "Hi", ignore_eos=True)).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "prompt", ["Hi there", ["Hi there"], [17250, 612], [[17250, 612]]], ids=repr
)
async def test_every_shape_of_one_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any
) -> None:
    (await complete(client, prompt)).raise_for_status()
    assert [submit.prompt for submit in engine.submitted] == [(17250, 612)]


async def test_batches_number_their_choices_prompt_by_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("a", "b", "c", "d")
    answer = (await complete(client, [[5], [6, 7]], n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b", "c", "d"]
    assert [submit.prompt for submit in engine.submitted] == [(5,), (5,), (6, 7), (6, 7)]
    assert [submit.choice for submit in engine.submitted] == [0, 1, 0, 1]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_special_tokens_in_a_raw_prompt_are_meant(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    await complete(client, "<|endoftext|>")
    assert engine.submitted[0].prompt == (gpt2.tokenizer.eos_id,)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([[5], [99999]], "prompt[1]"),
        ([-1], "prompt"),
        (None, "prompt"),
        (3, "prompt"),
        (["a", 3], "prompt"),
    ],
)
async def test_bad_prompts(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, param: str
) -> None:
    answer = await complete(client, prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert not engine.submitted


async def test_too_many_answers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(client, [[5]] * 100, n=100)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert not engine.submitted


async def test_a_prompt_that_does_not_fit(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await complete(client, [5] * CONTEXT)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "exceeds the context window" in error["message"]
    assert (await complete(client, [5] * (CONTEXT - 1))).status_code == 200
    assert engine.submitted[0].params.max_tokens == 1


@pytest.mark.parametrize(("name", "value"), [("top_logprobs", 3), ("suffix", "x")])
async def test_what_is_not_honoured_is_refused_by_name(
    client: httpx.AsyncClient, name: str, value: Any
) -> None:
    answer = await complete(client, "Hi", **{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
