"""Tools over HTTP: what the model writes, as clients get it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.server.app import create_app
from localllm.server.served_model import ServedModel
from localllm.server.service import Service
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer
from tests.helpers import chat_templates
from tests.server.fakes import FakeEngine, events_of
from tests.text.vocabularies import CONTROL, byte_level, write_vocabulary

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "What."}},
                "required": ["key"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {}}},
]
LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a \\"b\\" c"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ARGUMENTS = {"key": 'a "b" c'}


def template_source(name: str) -> str:
    (path,) = chat_templates(name)
    return path.read_text()


@asynccontextmanager
async def client_of(
    engine: FakeEngine, model: ServedModel, source: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A server of this model, with a chat template of this source."""
    model = replace(model, template=ChatTemplate({"default": source}, model.tokenizer))
    engine.context = 4000
    service = Service(engine, lambda: model)
    await service.load()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await service.close()


@pytest.fixture
async def qwen(engine: FakeEngine, gpt2: ServedModel) -> AsyncIterator[httpx.AsyncClient]:
    source = template_source("Qwen-Qwen2.5-7B-Instruct")
    async with client_of(engine, gpt2, source) as client:
        yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post(URL, json={"messages": HELLO, "tools": TOOLS, **fields})
    answer.raise_for_status()
    return answer.json()


async def ask_stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, **fields}
    answer = await client.post(URL, json=body)
    answer.raise_for_status()
    return events_of(answer.content)


def deltas_of(events: list[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]


def prompt_text(engine: FakeEngine, model: ServedModel) -> str:
    return model.tokenizer.decode(engine.submitted[-1].prompt, skip_special=False)


class TestCalls:
    async def test_whole(self, qwen: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.say(f"Let me see.\n{LOOK_UP}\n{NOW}")
        (choice,) = (await ask(qwen))["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me see."
        first, second = message["tool_calls"]
        assert first["type"] == second["type"] == "function"
        assert first["id"] != second["id"]
        assert json.loads(first["function"]["arguments"]) == ARGUMENTS
        assert second["function"] == {"name": "now", "arguments": "{}"}

    async def test_content_is_null_beside_calls_alone(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(NOW)
        (choice,) = (await ask(qwen))["choices"]
        assert choice["message"]["content"] is None
        assert "reasoning" not in choice["message"]

    async def test_fault_01_streamed_arguments_are_json(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(f"{LOOK_UP}\n{NOW}")
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas_of(await ask_stream(qwen)):
            for call in delta.get("tool_calls", ()):
                known = calls.setdefault(call["index"], {"arguments": "", "ids": [], "names": []})
                known["arguments"] += call["function"].get("arguments", "")
                known["ids"] += [call["id"]] if "id" in call else []
                known["names"] += [call["function"]["name"]] if "name" in call["function"] else []
        assert json.loads(calls[0]["arguments"]) == ARGUMENTS
        assert json.loads(calls[1]["arguments"]) == {}
        assert [call["names"] for call in calls.values()] == [["look_up"], ["now"]]
        assert all(len(call["ids"]) == 1 for call in calls.values())

    async def test_fault_02_long_arguments_are_not_held_back(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(LOOK_UP.replace("a ", "word " * 50))
        deltas = deltas_of(await ask_stream(qwen))
        fragments = [delta for delta in deltas if "tool_calls" in delta]
        assert len(fragments) > 50

    async def test_fault_03_index_and_finish_reason(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(f"A\n{LOOK_UP}\n{NOW}")
        events = await ask_stream(qwen)
        indices = [call["index"] for d in deltas_of(events) for call in d.get("tool_calls", ())]
        assert indices == sorted(indices)
        assert set(indices) == {0, 1}
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert events[-2]["choices"][0]["delta"] == {}
        assert [e["choices"][0]["finish_reason"] for e in events[:-2]] == [None] * (len(events) - 2)

    async def test_streamed_and_whole_answers_agree_at_every_length(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(f"See:\n{LOOK_UP}\n{NOW}")
        for limit in range(1, 60, 3):
            (choice,) = (await ask(qwen, max_tokens=limit))["choices"]
            events = await ask_stream(qwen, max_tokens=limit)
            content = "".join(delta.get("content", "") for delta in deltas_of(events))
            arguments: dict[int, str] = {}
            for delta in deltas_of(events):
                for call in delta.get("tool_calls", ()):
                    text = call["function"].get("arguments", "")
                    arguments[call["index"]] = arguments.get(call["index"], "") + text
            message = choice["message"]
            assert content == (message["content"] or "")
            whole = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            assert list(arguments.values()) == whole
            assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]

    async def test_a_call_that_max_tokens_cuts_off_ends_with_length(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(LOOK_UP)
        (choice,) = (await ask(qwen, max_tokens=16))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "look_up"

    @pytest.mark.parametrize("choice", ["auto", "required"])
    async def test_arguments_that_max_tokens_cuts_off_are_as_they_were_streamed(
        self, qwen: httpx.AsyncClient, engine: FakeEngine, choice: str
    ) -> None:
        """Neither `{}` in place of what was to come, nor a piece of a mark as content."""
        engine.say(LOOK_UP)
        full = json.dumps(ARGUMENTS)
        lengths = set()
        for limit in range(1, 40):
            (answer,) = (await ask(qwen, max_tokens=limit, tool_choice=choice))["choices"]
            for call in answer["message"].get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                assert full.startswith(arguments)
                lengths.add(len(arguments))
                assert answer["finish_reason"] == "length" or arguments == full
            if choice == "required":
                assert not answer["message"]["content"]
        assert len(lengths) > 3

    @pytest.mark.parametrize("stop", ["\n", '"key"', ", ", "}", "b", "</tool_call>"])
    async def test_stop_strings_do_not_cut_calls(
        self, qwen: httpx.AsyncClient, engine: FakeEngine, stop: str
    ) -> None:
        """They hold before the first and behind the last."""
        engine.say(f'See: {LOOK_UP}{LOOK_UP}. 1 bird\n2, }} "key" </tool_call>')
        (choice,) = (await ask(qwen, stop=["never", stop]))["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
        assert arguments == [json.dumps(ARGUMENTS)] * 2
        assert message["content"].startswith("See: .")
        assert stop not in message["content"]
        deltas = deltas_of(await ask_stream(qwen, stop=["never", stop]))
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
        (choice,) = (await ask(qwen, stop="ee"))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("S", "stop")

    async def test_without_tools_marks_are_text(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(NOW)
        (choice,) = (await ask(qwen, tools=None))["choices"]
        assert choice["message"] == {"role": "assistant", "content": NOW, "refusal": None}
        assert choice["finish_reason"] == "stop"

    async def test_usage_comes_when_asked_for_and_last(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say(NOW)
        events = await ask_stream(qwen, stream_options={"include_usage": True})
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] > 0
        assert deltas_of(events)[0] == {"role": "assistant", "content": ""}
        assert sum("role" in delta for delta in deltas_of(events)) == 1


class TestChoice:
    @pytest.mark.parametrize(
        ("choice", "forced"),
        [
            ("required", True),
            ({"type": "function", "function": {"name": "now"}}, True),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "now"}}],
                    },
                },
                True,
            ),
            ("auto", False),
            (None, False),
        ],
    )
    async def test_fault_04_tool_choice_is_in_the_grammar(
        self, qwen: httpx.AsyncClient, engine: FakeEngine, choice: Any, forced: bool
    ) -> None:
        engine.say(NOW)
        await ask(qwen, tool_choice=choice)
        grammar = engine.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.kind == "lark"
        assert grammar.source.startswith("start: r") == forced or "lazy" in grammar.source
        named = isinstance(choice, dict)
        assert ("look_up" in grammar.source) is not named

    async def test_fault_04_none_means_none(
        self, qwen: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        engine.say("Hi")
        await ask(qwen, tool_choice="none")
        assert "look_up" not in prompt_text(engine, gpt2)
        assert engine.submitted[-1].params.bad_words == ("<tool_call>",)

    @pytest.mark.parametrize(
        "choice",
        [
            "sometimes",
            {"type": "function", "function": {"name": "nobody"}},
            {"type": "function"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        ],
    )
    async def test_fault_04_what_makes_no_sense_is_refused(
        self, qwen: httpx.AsyncClient, choice: Any
    ) -> None:
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
        answer = await qwen.post(URL, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"

    async def test_tools_to_choose_from_are_needed(self, qwen: httpx.AsyncClient) -> None:
        answer = await qwen.post(URL, json={"messages": HELLO, "tool_choice": "required"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")

    @pytest.mark.parametrize(
        "tools",
        [
            [{"type": "web_search"}],
            [{"type": "function", "function": {"name": "a b"}}],
            [{"type": "function", "function": {"name": "a", "parameters": 1}}],
            [TOOLS[0], TOOLS[0]],
        ],
    )
    async def test_bad_tools_are_refused(self, qwen: httpx.AsyncClient, tools: Any) -> None:
        answer = await qwen.post(URL, json={"messages": HELLO, "tools": tools})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("tools")

    async def test_fault_09_a_keyword_that_is_not_enforced_is_named(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        schema = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
        answer = await qwen.post(URL, json=body)
        assert answer.status_code == 400
        place = "tools[0].function.parameters.properties.x.not"
        assert answer.json()["error"]["param"] == place
        engine.say('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
        (choice,) = (await ask(qwen, tools=tools))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'

    async def test_content_may_have_a_schema_beside_tools(
        self, qwen: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.say('{"x":1}')
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await ask(qwen, response_format=response_format)
        grammar = engine.submitted[-1].params.grammar
        assert grammar is not None
        assert '"x"' in grammar.source
        assert "look_up" in grammar.source


class TestTurns:
    @pytest.mark.parametrize("arguments", ['{"key": "b"}', {"key": "b"}])
    async def test_calls_and_results_come_back(
        self, qwen: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel, arguments: Any
    ) -> None:
        function = {"name": "look_up", "arguments": arguments}
        messages = [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "It is c."},
        ]
        engine.say("c")
        await ask(qwen, messages=messages)
        prompt = prompt_text(engine, gpt2)
        assert '{"name": "look_up", "arguments": {"key": "b"}}' in prompt
        assert "<tool_response>\nIt is c.\n</tool_response>" in prompt

    async def test_a_template_without_calls_has_them_in_words(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        function = {"name": "look_up", "arguments": '{"key": "b"}'}
        messages = [
            {"role": "system", "content": "Be brief."},
            *HELLO,
            {
                "role": "assistant",
                "content": "Well.",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "It is c."},
        ]
        engine.say(LOOK_UP)
        async with client_of(engine, gpt2, template_source("google-gemma-2-2b-it")) as client:
            answer = await ask(client, messages=messages)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        prompt = prompt_text(engine, gpt2)
        assert "Be brief.\n\nYou can call functions." in prompt
        assert '{"name": "look_up", "arguments": {"key": "b"}}' in prompt
        assert "<tool_response>\nIt is c.\n</tool_response>" in prompt

    async def test_ids_are_made_to_suit_the_template(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        """Mistral's refuse ids that are not of nine letters and digits."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        messages = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call_longer_1", **call}]},
            {"role": "tool", "tool_call_id": "call_longer_1", "content": "c"},
        ]
        engine.say('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]')
        source = template_source("mistralai-Mistral-Nemo-Instruct-2407")
        async with client_of(engine, gpt2, source) as client:
            answer = await ask(client, messages=messages)
        (made,) = answer["choices"][0]["message"]["tool_calls"]
        assert len(made["id"]) == 9
        assert made["id"].isalnum()


MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


async def test_control_tokens_reach_the_parser_and_nobody_else(tmp_path: Path) -> None:
    special = dict.fromkeys(["<|end|>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"], CONTROL)
    path = write_vocabulary(tmp_path / "v.gguf", byte_level(special, eos_token_id=256))
    tokenizer = load_tokenizer(path)
    engine = FakeEngine(tokenizer)
    engine.say('Hm.[INST][TOOL_CALLS]look_up[ARGS]{"key": "[ARGS]"}')
    source = MISTRAL
    template = ChatTemplate({"default": source}, tokenizer)
    model = ServedModel(id="m", created=1, tokenizer=tokenizer, template=template, details={})
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    async with client_of(engine, model, source) as client:
        (choice,) = (await ask(client, messages=messages))["choices"]
        await ask(client, messages=messages, tool_choice="none")
    assert engine.submitted[-1].params.logit_bias.keys() == {
        tokenizer.special_tokens["[TOOL_CALLS]"]
    }
    assert choice["message"]["content"] == "Hm."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"key": "[ARGS]"}'}


class TestTemplates:
    async def test_fault_05_a_refusal_of_the_template_is_quoted(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        async with client_of(engine, gpt2, "{{ raise_exception('Too hot today') }}") as client:
            answer = await client.post(URL, json={"messages": HELLO})
        assert answer.status_code == 400
        assert "Too hot today" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "messages"

    async def test_fault_05_turns_of_one_role_are_merged_where_they_must_alternate(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        messages = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
        async with client_of(engine, gpt2, template_source("google-gemma-2-2b-it")) as client:
            await ask(client, messages=messages, tools=None)
        assert "One.\n\nTwo." in prompt_text(engine, gpt2)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("Qwen-Qwen2.5-7B-Instruct", "<|im_start|>system\nBe brief."),
            ("openai-gpt-oss-120b", "<|start|>developer<|message|># Instructions\n\nBe brief."),
        ],
    )
    async def test_fault_06_developer_is_system_unless_the_template_knows_it(
        self, engine: FakeEngine, gpt2: ServedModel, name: str, expected: str
    ) -> None:
        messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
        async with client_of(engine, gpt2, template_source(name)) as client:
            await ask(client, messages=messages, tools=None)
        assert expected in prompt_text(engine, gpt2)
