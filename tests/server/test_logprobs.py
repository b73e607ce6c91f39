"""Log-probabilities in both shapes, echo, best_of: what the engine tells reaches the client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from localllm.server.served_model import ServedModel
from localllm.text.tokenizer import Tokenizer
from tests.server.fakes import CONTEXT, FakeEngine, events_of

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
SAID = "Grüße! 日本語 and 👩‍👩‍👧 too."


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def complete(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": prompt, **fields})


def text_of(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token) or tokenizer.token_text(token).encode()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def test_fault_24_a_chat_has_content_entries(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say(SAID)
    tokens = gpt2.tokenizer.encode(SAID, add_special=False)
    (choice,) = (await chat(client)).raise_for_status().json()["choices"]
    assert choice["logprobs"].keys() == {"content", "refusal"}
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == SAID
    assert [one["token"] for one in content] == [text_of(gpt2.tokenizer, t) for t in tokens]
    assert [one["logprob"] for one in content] == [-t / 1000 for t in tokens]
    for token, one in zip(tokens, content, strict=True):
        assert one["top_logprobs"] == [
            {
                "token": text_of(gpt2.tokenizer, token + i),
                "logprob": -token / 1000 - i,
                "bytes": list(
                    gpt2.tokenizer.token_bytes(token + i)
                    or gpt2.tokenizer.token_text(token + i).encode()
                ),
            }
            for i in range(2)
        ]


async def test_without_a_wish_there_are_none(client: httpx.AsyncClient) -> None:
    (choice,) = (await chat(client, logprobs=False, top_logprobs=None)).json()["choices"]
    assert choice["logprobs"] is None
    (choice,) = (await complete(client, "Hi")).json()["choices"]
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice
    assert (await chat(client, logprobs=False)).json()["error"]["param"] == "top_logprobs"
    assert (await chat(client, top_logprobs=21)).status_code == 400
    alone = (await chat(client, top_logprobs=None)).json()["choices"][0]["logprobs"]["content"]
    assert all(one["top_logprobs"] == [] for one in alone)


@pytest.mark.parametrize("stop", [None, "too", "語 a", "r", "zzz"])
async def test_a_streamed_chat_tells_the_same(
    client: httpx.AsyncClient, engine: FakeEngine, stop: str | None
) -> None:
    engine.say(SAID)
    whole = (await chat(client, stop=stop)).json()["choices"][0]
    engine.say(SAID)
    events = events_of((await chat(client, stop=stop, stream=True)).content)[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    content = [one for c in choices if c["logprobs"] for one in c["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    assert text == whole["message"]["content"]
    joined = b"".join(bytes(one["bytes"]) for one in content).decode(errors="ignore")
    assert joined.startswith(text)  # the last token may reach into the stop string
    assert len(joined) < len(text) + 12


async def test_fault_24_a_completion_has_the_four_arrays(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say(SAID)
    tokens = [*gpt2.tokenizer.encode(SAID, add_special=False), gpt2.tokenizer.eos_id]
    (choice,) = (await complete(client, "Hi", logprobs=2, max_tokens=99)).json()["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert logprobs["tokens"] == [text_of(gpt2.tokenizer, t) for t in tokens if t is not None]
    assert logprobs["token_logprobs"] == [-t / 1000 for t in tokens if t is not None]
    for token, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert max(top.values()) == token  # exactly: the fake's tokens are the likeliest ones
        assert len(top) == 2
    for name, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert choice["text"][at:].startswith(name) or name == "<|endoftext|>"
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("as_ids", [False, True])
async def test_fault_24_echo_begins_with_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel, as_ids: bool
) -> None:
    """As lm-eval asks: it reads token_logprobs[ctxlen:-1], so one token has to come behind."""
    prompt = "Zwei Grüße 日本"
    ids = gpt2.tokenizer.encode(prompt, parse_special=True)
    engine.say(" there")
    sent: list[Any] = [ids, [72]] if as_ids else [prompt, "i"]
    answer = await complete(client, sent, echo=True, logprobs=1, max_tokens=1, temperature=0)
    first, second = answer.raise_for_status().json()["choices"]
    assert first["text"] == prompt + " there"
    logprobs = first["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == [-t / 1000 for t in ids[1:]]
    for one, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert one == max(top.values())
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-1] == len(prompt)
    assert len(second["logprobs"]["tokens"]) == 2
    assert [s.params.max_tokens for s in engine.submitted] == [1, 1]


async def test_echo_streams_the_prompt_first(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2}
    engine.say(" there")
    whole = (await complete(client, "Hello 日本", **fields)).json()["choices"]
    engine.say(" there")
    events = events_of((await complete(client, "Hello 日本", stream=True, **fields)).content)[:-1]
    for index in range(2):
        parts = [c for event in events for c in event["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in parts) == whole[index]["text"] == "Hello 日本 there"
        for name, values in whole[index]["logprobs"].items():
            streamed = [v for c in parts if c["logprobs"] for v in c["logprobs"][name]]
            assert streamed == values


async def test_echo_alone_and_nothing_behind_it(client: httpx.AsyncClient) -> None:
    (choice,) = (await complete(client, "Hello", echo=True, max_tokens=0)).json()["choices"]
    assert choice == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}
    (choice,) = (await complete(client, "Hello", max_tokens=0)).json()["choices"]
    assert choice["text"] == ""
    answer = (await complete(client, "a b", echo=True, max_tokens=0, logprobs=0)).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 2
    assert answer["usage"]["completion_tokens"] == 0
    full = [5] * CONTEXT
    assert (await complete(client, full, echo=True, max_tokens=0)).status_code == 200
    assert (await complete(client, full, echo=True, max_tokens=1)).status_code == 400


async def test_prompt_logprobs_go_by_token_id(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    (choice,) = (await complete(client, [5, 70, 80], prompt_logprobs=2)).json()["choices"]
    assert choice["logprobs"] is None
    told = choice["prompt_logprobs"]
    assert told[0] is None
    assert told[1]["70"] == {"logprob": -0.07, "rank": 1, "decoded_token": "g"}
    assert list(told[2]) == ["80", "81"]
    whole = (await chat(client, logprobs=None, top_logprobs=None, prompt_logprobs=0)).json()
    assert len(whole["prompt_logprobs"]) == len(engine.submitted[-1].prompt)
    refused = await complete(client, "Hi", prompt_logprobs=1, stream=True)
    assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_best_of_gives_the_likeliest(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    texts = ["zzz qqq", "a", "!", "the the"]

    def mean(text: str) -> float:
        tokens = [*gpt2.tokenizer.encode(text, add_special=False), gpt2.tokenizer.eos_id or 0]
        return -sum(tokens) / len(tokens)

    engine.say(*texts)
    answer = (await complete(client, "Hi", n=2, best_of=4)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert [c["text"] for c in answer["choices"]] == sorted(texts, key=mean, reverse=True)[:2]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert len(engine.submitted) == 4
    assert {s.choice for s in engine.submitted} == {0, 1, 2, 3}
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        refused = await complete(client, "Hi", **fields)
        assert refused.json()["error"]["param"] == "best_of"
    assert (await complete(client, [[5]] * 100, best_of=100)).json()["error"]["param"] == "n"


async def test_truncation_is_asked_for_and_told(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    long = list(range(100, 100 + CONTEXT + 50))
    answer = await complete(client, long, truncate_prompt_tokens=40)
    assert engine.submitted[-1].prompt == tuple(long[-40:])
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 40
    assert usage["prompt_tokens_details"]["truncated_tokens"] == len(long) - 40
    assert answer.headers["x-localllm-truncated-tokens"] == str(len(long) - 40)
    answer = await complete(client, long, truncate_prompt_tokens=-1, max_tokens=30)
    assert len(engine.submitted[-1].prompt) == CONTEXT - 30
    assert engine.submitted[-1].params.max_tokens == 30
    answer = await complete(client, [5] * 9, truncate_prompt_tokens=40)
    assert "x-localllm-truncated-tokens" not in answer.headers
    assert (await complete(client, long, truncate_prompt_tokens=CONTEXT)).status_code == 400
    assert (await complete(client, long, truncate_prompt_tokens=0)).status_code == 400


async def test_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "typical_p": 0.5,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["x"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "min_tokens": 2,
        "bad_words": ["no"],
    }
    assert (await complete(client, "Hi", **fields)).status_code == 200
    params = engine.submitted[-1].params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
    assert (await complete(client, "Hi", min_tokens=9, max_tokens=3)).status_code == 400
    for name, value in (("bad_words", [""]), ("typical_p", 0), ("mirostat", 1), ("dry_base", 0.5)):
        refused = await complete(client, "Hi", **{name: value})
        assert refused.json()["error"]["param"] == name


async def test_stop_strings_do_not_count_before_min_tokens(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("one two one two")
    answer = (await complete(client, "Hi", stop=["two"], min_tokens=3)).json()
    assert answer["choices"][0]["text"] == "one two one "
