"""tool_choice enforced by the real engine, through the SDK, on models that would never call."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gguf import GGUFReader

from tests.helpers import FIXTURES
from tests.server.real import HANG, real_server

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
HELLO: list[Any] = [{"role": "user", "content": "Weather?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Rome", "Bonn"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
THINKER = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "<|assistant|>{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
)
ASKED: Any = {"model": "x", "messages": HELLO, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A random model, with more context than its file says: it spells the tools' definitions."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    shutil.copy(TINY, path)
    widen(path)
    yield from client_of(path)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The same, with a template that begins the thinking."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", THINKER]
    subprocess.run([*command, TINY, path], check=True, capture_output=True)
    widen(path)
    yield from client_of(path)


def widen(path: Path) -> None:
    field = GGUFReader(path, "r+").fields["llama.context_length"]
    field.parts[field.data[0]][0] = 2048


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    yield from client_of(request.getfixturevalue(request.param))


def client_of(path: Path) -> Iterator[openai.OpenAI]:
    with (
        real_server(path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG) as client,
    ):
        yield client


def check_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "now":
        assert found == {}
        return
    assert name == "weather"
    assert found.keys() <= {"city", "days"}
    assert found["city"] in ("Rome", "Bonn")
    assert found.get("days", 0) in range(10)


def check_enforced(client: openai.OpenAI, seed: int) -> None:
    """fault 04: what has to be called is called, rightly, streamed as whole."""
    for choice in ("required", WEATHER):
        asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        (answer,) = client.chat.completions.create(**asked).choices
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        if choice == WEATHER:
            assert call.function.name == "weather"

        name = arguments = ""
        reason = None
        for chunk in client.chat.completions.create(**asked, stream=True):
            (piece,) = chunk.choices
            for part in piece.delta.tool_calls or ():
                assert part.function is not None
                name += part.function.name or ""
                arguments += part.function.arguments or ""
            reason = piece.finish_reason or reason
        assert (name, arguments) == (call.function.name, call.function.arguments)
        assert reason == "tool_calls"


@pytest.mark.parametrize("seed", [1, 2])
def test_fault_04_a_random_model_calls_what_it_has_to(tiny: openai.OpenAI, seed: int) -> None:
    check_enforced(tiny, seed)


def test_fault_04_a_random_model_calls_nothing_where_none_is_wanted(tiny: openai.OpenAI) -> None:
    answer = tiny.chat.completions.create(**{**ASKED, "tool_choice": "none", "max_tokens": 30})
    assert answer.choices[0].finish_reason != "tool_calls"
    assert answer.choices[0].message.tool_calls is None


class TestThinking:
    """With a budget: of its own a random model would not stop thinking."""

    def test_fault_08_calls_come_after_thinking(self, thinker: openai.OpenAI) -> None:
        asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "seed": 4}
        answer = thinker.chat.completions.create(**asked, extra_body={"thinking_budget": 20})
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        assert (choice.message.model_extra or {})["reasoning_content"]
        assert 20 < self.reasoning_tokens(answer) <= 20 + len("\n</think>")

    @pytest.mark.parametrize("budget", [0, 10])
    def test_fault_08_a_schema_holds_after_thinking(
        self, thinker: openai.OpenAI, budget: int
    ) -> None:
        schema: Any = {"type": "object", "properties": {"x": {"type": "boolean"}}}
        schema |= {"required": ["x"], "additionalProperties": False}
        answer = thinker.chat.completions.create(
            model="x",
            messages=HELLO,
            max_tokens=200,
            seed=5,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
            extra_body={"thinking_budget": budget},
        )
        assert json.loads(answer.choices[0].message.content or "").keys() == {"x"}
        assert budget < self.reasoning_tokens(answer) <= budget + len("\n</think>")

    def test_enable_thinking(self, thinker: openai.OpenAI) -> None:
        answer = thinker.chat.completions.create(
            model="x",
            messages=HELLO,
            max_tokens=20,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert "reasoning" not in (answer.choices[0].message.model_extra or {})
        assert self.reasoning_tokens(answer) == 0

    @staticmethod
    def reasoning_tokens(answer: Any) -> int:
        count: int = answer.usage.completion_tokens_details.reasoning_tokens
        return count


@pytest.mark.model
def test_fault_04_a_real_model_calls_what_it_has_to(real: openai.OpenAI) -> None:
    check_enforced(real, seed=3)
