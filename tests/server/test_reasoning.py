"""Thinking over HTTP: kept apart from the answer, limited, and counted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from localllm.server.served_model import ServedModel
from tests.server.fakes import FakeEngine
from tests.server.test_tools import (
    LOOK_UP,
    TOOLS,
    ask,
    ask_stream,
    client_of,
    deltas_of,
    prompt_text,
    template_source,
)

pytestmark = pytest.mark.anyio

# Its prompts end within the thinking, as those of DeepSeek-R1.
OPENS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if thinking_budget %}(Think in {{ thinking_budget }} tokens.){% endif %}"
    "<|assistant|><think>\n"
)
MAY_THINK = "Qwen-Qwen3-0.6B"
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}},
}


async def test_fault_07_thinking_that_the_prompt_has_begun(
    engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say("I think so.\n</think>\n\nYes.")
    async with client_of(engine, gpt2, OPENS) as client:
        answer = await ask(client, tools=None)
        message = answer["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == message["reasoning"] == "I think so."
        details = answer["usage"]["completion_tokens_details"]
        ids = gpt2.tokenizer.encode("I think so.\n</think>", add_special=False)
        assert details["reasoning_tokens"] == len(ids)

        deltas = deltas_of(await ask_stream(client, tools=None))
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "I think so."
        assert "".join(d.get("reasoning", "") for d in deltas) == "I think so."
        assert "".join(d.get("content", "") for d in deltas) == "Yes."
        kinds = ["content" if "content" in delta else "reasoning" for delta in deltas[1:-1]]
        assert kinds == sorted(kinds, reverse=True)


async def test_fault_07_streamed_and_whole_answers_agree_at_every_length(
    engine: FakeEngine, gpt2: ServedModel
) -> None:
    engine.say("I think.\n</think>\n\nYes, so. ")
    async with client_of(engine, gpt2, OPENS) as client:
        for limit in range(1, 18):
            (choice,) = (await ask(client, tools=None, max_tokens=limit))["choices"]
            deltas = deltas_of(await ask_stream(client, tools=None, max_tokens=limit))
            message = choice["message"]
            reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
            assert reasoning == message.get("reasoning", "")
            assert "".join(d.get("content", "") for d in deltas) == message["content"]


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Yes. <think> is a tag.", None, "Yes. <think> is a tag."),
    ],
)
async def test_thinking_that_the_model_begins_itself(
    engine: FakeEngine, gpt2: ServedModel, said: str, reasoning: str | None, content: str
) -> None:
    engine.say(said)
    async with client_of(engine, gpt2, template_source(MAY_THINK)) as client:
        message = (await ask(client, tools=None))["choices"][0]["message"]
    assert message.get("reasoning") == reasoning
    assert message["content"] == content


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ],
)
async def test_enable_thinking_reaches_the_template(
    engine: FakeEngine, gpt2: ServedModel, fields: dict[str, Any]
) -> None:
    engine.say("</think> is a tag.")
    async with client_of(engine, gpt2, template_source(MAY_THINK)) as client:
        message = (await ask(client, tools=None, **fields))["choices"][0]["message"]
        assert prompt_text(engine, gpt2).endswith("<think>\n\n</think>\n\n")
    assert message["content"] == "</think> is a tag."


async def test_reasoning_effort_reaches_the_template(engine: FakeEngine, gpt2: ServedModel) -> None:
    async with client_of(engine, gpt2, template_source("openai-gpt-oss-120b")) as client:
        await ask(client, tools=None, reasoning_effort="high")
    assert "Reasoning: high" in prompt_text(engine, gpt2)


async def test_channels(engine: FakeEngine, gpt2: ServedModel) -> None:
    engine.say(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    async with client_of(engine, gpt2, template_source("openai-gpt-oss-120b")) as client:
        message = (await ask(client, tools=None))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
        engine.say(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.look_up <|constrain|>json<|message|>{"key": "a"}'
        )
        (choice,) = (await ask(client))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"key": "a"}'}


class TestFault08:
    """The grammar starts after thinking, not inside it."""

    async def test_fault_08_where_the_prompt_has_begun_the_thinking(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        async with client_of(engine, gpt2, OPENS) as client:
            await ask(client, tools=None, response_format=SCHEMA)
            grammar = engine.submitted[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.after) == ("json_schema", ("</think>",))
            await ask(client, tool_choice="required")
            grammar = engine.submitted[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.after) == ("lark", ("</think>",))

    async def test_fault_08_where_the_model_may_think(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        async with client_of(engine, gpt2, template_source(MAY_THINK)) as client:
            await ask(client, tools=None, response_format=SCHEMA)
            grammar = engine.submitted[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.after) == ("lark", ())
            assert "<think>" in grammar.source
            await ask(client, tools=None, response_format=SCHEMA, enable_thinking=False)
            grammar = engine.submitted[-1].params.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.after) == ("json_schema", ())


class TestBudget:
    @pytest.mark.parametrize("name", ["thinking_budget", "reasoning_budget"])
    async def test_the_engine_is_told(
        self, engine: FakeEngine, gpt2: ServedModel, name: str
    ) -> None:
        async with client_of(engine, gpt2, OPENS) as client:
            await ask(client, tools=None, **{name: 7})
        budget = engine.submitted[-1].params.thinking_budget
        assert budget is not None
        assert (budget.max_tokens, budget.end) == (7, ("</think>",))
        assert gpt2.tokenizer.decode(budget.forced) == "\n</think>"

    async def test_the_prompt_begins_the_thinking_that_is_counted(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        engine.say("Hm.\n</think>\n\nYes.")
        async with client_of(engine, gpt2, template_source(MAY_THINK)) as client:
            message = (await ask(client, tools=None, thinking_budget=7))["choices"][0]["message"]
        assert prompt_text(engine, gpt2).endswith("assistant\n<think>")
        assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")

    async def test_in_channels(self, engine: FakeEngine, gpt2: ServedModel) -> None:
        engine.say("Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
        async with client_of(engine, gpt2, template_source("openai-gpt-oss-120b")) as client:
            answer = await ask(client, tools=None, thinking_budget=7, response_format=SCHEMA)
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
        assert prompt_text(engine, gpt2).endswith("assistant<|channel|>analysis<|message|>")
        params = engine.submitted[-1].params
        assert params.thinking_budget is not None
        assert params.thinking_budget.end == ("<|end|>",)
        assert params.grammar is not None
        assert params.grammar.after == ("<|end|>",)
        assert params.grammar.source.startswith('start: "<|start|>assistant"')

    async def test_a_template_that_knows_budgets_is_told(
        self, engine: FakeEngine, gpt2: ServedModel
    ) -> None:
        async with client_of(engine, gpt2, OPENS) as client:
            await ask(client, tools=None, thinking_budget=512)
        assert "Think in 512 tokens." in prompt_text(engine, gpt2)

    async def test_a_model_that_marks_no_thinking_has_none(self, client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "thinking_budget": 7}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "thinking_budget"


async def test_thinking_of_earlier_turns_comes_back(engine: FakeEngine, gpt2: ServedModel) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    for name, field in ((MAY_THINK, "reasoning_content"), (MAY_THINK, "reasoning")):
        engine = FakeEngine(gpt2.tokenizer, "Yes.")
        messages = [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "tool_calls": [{"id": "1", **call}], field: "I look it up."},
            {"role": "tool", "tool_call_id": "1", "content": "b"},
        ]
        async with client_of(engine, gpt2, template_source(name)) as client:
            await ask(client, messages=messages, tools=TOOLS)
        assert "<think>\nI look it up.\n</think>" in prompt_text(engine, gpt2)
        assert LOOK_UP[:20] in prompt_text(engine, gpt2)
