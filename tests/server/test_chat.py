"""POST /v1/chat/completions, answered whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from localllm.server.app import create_app
from localllm.server.served_model import ServedModel
from localllm.server.service import Service
from localllm.text.chat_template import ChatTemplate
from tests.helpers import chat_templates
from tests.server.fakes import CONTEXT, FakeEngine

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(URL, json={"model": "any", "messages": HELLO, **fields})


def prompt_text(engine: FakeEngine, model: ServedModel) -> str:
    return model.tokenizer.decode(engine.submitted[-1].prompt, skip_special=False)


async def test_answer_has_openais_shape(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say("Hi there.")
    engine.cached_tokens = 3
    answer = (await ask(client)).raise_for_status().json()
    prompt = len(engine.submitted[0].prompt)
    completion = len(gpt2.tokenizer.encode("Hi there.")) + 1
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1.7e9
    assert answer.pop("system_fingerprint").startswith("localllm-")
    timings = answer.pop("timings")
    assert (timings["cache_n"], timings["predicted_n"]) == (3, completion)
    assert answer == {
        "object": "chat.completion",
        "model": "gpt2",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 3, "truncated_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert engine.cancelled == []


async def test_prompt_is_the_template_rendered(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "One, "}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    (await ask(client, messages=messages)).raise_for_status()
    assert prompt_text(engine, gpt2) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne, two<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_developer_is_system_to_a_template_that_does_not_know_it(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    await ask(client, messages=[{"role": "developer", "content": "Be brief."}, *HELLO])
    assert "<|im_start|>system\nBe brief." in prompt_text(engine, gpt2)


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repeat_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        seed=-2,
        stop="###",
        stop_token_ids=[7],
        ignore_eos=True,
        max_tokens=9,
        max_completion_tokens=8,
    )
    params = engine.submitted[0].params
    assert params.temperature == 0.5
    assert params.top_p == 0.9
    assert params.top_k == 0
    assert params.min_p == 0.1
    assert params.presence_penalty == 0.2
    assert params.frequency_penalty == 0.3
    assert params.repetition_penalty == 1.1
    assert params.logit_bias == {5: -100, 6: 1.5}
    assert params.seed == 2**64 - 2
    assert params.stop == ("###",)
    assert params.stop_token_ids == (7,)
    assert params.ignore_eos
    assert params.max_tokens == 8


async def test_null_is_the_default_of_every_field(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    names = (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
        "logit_bias seed stop stop_token_ids ignore_eos max_tokens max_completion_tokens n stream "
        "stream_options tools tool_choice response_format logprobs top_logprobs user metadata"
    )
    answer = await ask(client, **dict.fromkeys(names.split()))
    assert answer.status_code == 200
    assert engine.submitted[0].params.temperature == 1.0


async def test_every_request_without_a_seed_draws_one_for_all_its_choices(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        (await ask(client, n=2, seed=None)).raise_for_status()
    seeds = [submit.params.seed for submit in engine.submitted]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert [submit.choice for submit in engine.submitted] == [0, 1, 0, 1]


async def test_choices_keep_their_order_and_the_prompt_counts_once(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("a b c d e", "f", "g h")
    answer = (await ask(client, n=3)).raise_for_status().json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["a b c d e", "f", "g h"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt)
    assert answer["usage"]["completion_tokens"] == 5 + 1 + 2 + 3


async def test_max_tokens_is_cut_to_what_the_context_leaves(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = (await ask(client, max_tokens=10**9, ignore_eos=True)).json()
    prompt = len(engine.submitted[0].prompt)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == CONTEXT - prompt
    await ask(client)
    assert engine.submitted[1].params.max_tokens == CONTEXT - prompt


async def test_a_prompt_that_does_not_fit_says_so(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    long = [{"role": "user", "content": "word " * CONTEXT}]
    answer = await ask(client, messages=long)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "exceeds the context window" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert not engine.submitted


async def test_stop_string_ends_the_sequence_in_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.say("one two three four")
    answer = (await ask(client, stop=["three", "zzz"])).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "one two "
    assert choice["finish_reason"] == "stop"
    assert engine.cancelled == [engine.submitted[0].sequence_id]
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_token_is_no_part_of_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say("one two three")
    (two,) = gpt2.tokenizer.encode(" two")
    answer = (await ask(client, stop_token_ids=[two])).json()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_unknown_fields_are_ignored_and_named(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "localllm.server")
    answer = await ask(client, shiny=1, **{"new\r\nx-evil": 2}, user="me", metadata={"a": "b"})
    assert answer.status_code == 200
    assert answer.headers["x-localllm-ignored"] == "shiny, new%0D%0Ax-evil"
    request_id = answer.headers["x-request-id"]
    assert f"{request_id}: fields that nobody here knows: shiny, new%0D%0Ax-evil" in caplog.text
    assert (await ask(client, **{"": 1})).headers["x-localllm-ignored"] == '""'
    assert "x-localllm-ignored" not in (await ask(client)).headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking_budget", 5),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("dynatemp_range", 0.5),
        ("mirostat", 1),
        ("use_beam_search", True),
        ("allowed_token_ids", [1]),
        ("skip_special_tokens", False),
        ("top_n_sigma", 1.5),
        ("guided_whitespace_pattern", " ?"),
        ("continue_final_message", True),
        ("chat_template", "{{ x }}"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, name: str, value: Any
) -> None:
    answer = await ask(client, **{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert not engine.submitted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", False),
        ("response_format", {"type": "text"}),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("modalities", ["text"]),
        ("typical_p", 1.0),
    ],
)
async def test_values_that_ask_for_nothing_are_fine(
    client: httpx.AsyncClient, name: str, value: Any
) -> None:
    answer = await ask(client, **{name: value})
    assert answer.status_code == 200
    assert "x-localllm-ignored" not in answer.headers


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_content_other_than_text_is_refused_by_name(
    client: httpx.AsyncClient, kind: str
) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]
    answer = await ask(client, messages=[*HELLO, {"role": "user", "content": parts}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[1].content[1]"
    assert kind in answer.json()["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


async def test_a_template_without_tools_has_them_told_in_words(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    await ask(client, tools=TOOLS)
    assert "look_up" in prompt_text(engine, gpt2)
    assert "<tool_call>" in prompt_text(engine, gpt2)
    without: list[dict[str, Any]] = [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in without:
        (await ask(client, **fields)).raise_for_status()
        assert "look_up" not in prompt_text(engine, gpt2)


async def test_tools_reach_a_template_that_knows_them(
    engine: FakeEngine, gpt2: ServedModel
) -> None:
    (path,) = chat_templates("Qwen-Qwen2.5-7B-Instruct")
    template = ChatTemplate({"default": path.read_text()}, gpt2.tokenizer)
    service = Service(engine, lambda: replace(gpt2, template=template))
    await service.load()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        (await ask(client, tools=TOOLS)).raise_for_status()
        assert "look_up" in prompt_text(engine, gpt2)
        (await ask(client, tools=TOOLS, tool_choice="none")).raise_for_status()
        assert "look_up" not in prompt_text(engine, gpt2)
    await service.close()


async def test_template_arguments_must_not_take_the_place_of_fields(
    client: httpx.AsyncClient,
) -> None:
    assert (await ask(client, chat_template_kwargs={"enable_thinking": False})).status_code == 200
    answer = await ask(client, chat_template_kwargs={"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
