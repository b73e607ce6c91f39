from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ChatTemplateError, RequestError, TemplateRenderError
from localllm.gguf import GGUFFile
from localllm.text.chat_template import CHATML, ChatTemplate
from localllm.text.tokenizer import load_tokenizer
from tests.helpers import chat_templates
from tests.text.vocabularies import (
    CONTROL,
    byte_level,
    published,
    tokenizer,
    write_vocabulary,
)

Message = dict[str, Any]

SYSTEM: Message = {"role": "system", "content": "Answer in verse."}
USER: Message = {"role": "user", "content": "What is <b>up</b>?"}
ASSISTANT: Message = {"role": "assistant", "content": "The sky."}
AGAIN: Message = {"role": "user", "content": "And down?"}
THREE_TURNS = [USER, ASSISTANT, AGAIN]

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "abcdefghi", "content": "It is sunny."}

# Templates that show tool definitions, of those in the tree and beside it.
WITHOUT_TOOLS = (
    *("microsoft-Phi-3.5-mini-instruct", "google-gemma-2-2b-it", "llama-cpp-rwkv-world"),
    *("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    *("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "HuggingFaceTB-SmolLM3-3B"),
)
ALL = pytest.mark.parametrize("path", chat_templates(), ids=lambda path: path.stem)


def template(source: str, **named: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **named}, tokenizer("phi-3"))


def named(name: str) -> ChatTemplate:
    (path,) = chat_templates(name)
    return published(path)


@ALL
class TestPublished:
    def test_a_conversation(self, path: Path) -> None:
        subject = published(path)
        prompt = subject.render([SYSTEM, *THREE_TURNS])
        for message in (SYSTEM, *THREE_TURNS):
            assert message["content"] in prompt
        assert subject.encode(THREE_TURNS)

    def test_asks_for_an_answer_only_when_told_to(self, path: Path) -> None:
        subject = published(path)
        asking = subject.render(THREE_TURNS)
        closed = subject.render(THREE_TURNS, add_generation_prompt=False)
        assert AGAIN["content"] in closed
        assert len(closed) <= len(asking)

    def test_tools(self, path: Path) -> None:
        subject = published(path)
        assert subject.supports_tools is (path.stem not in WITHOUT_TOOLS)
        prompt = subject.render([SYSTEM, *THREE_TURNS], tools=[TOOL])
        assert ("get_weather" in prompt) is subject.supports_tools

    def test_calls_and_results(self, path: Path) -> None:
        subject = published(path)
        try:
            prompt = subject.render([USER, CALL, RESULT, ASSISTANT, AGAIN], tools=[TOOL])
        except TemplateRenderError as refusal:
            assert "refused the messages: " in str(refusal)  # noqa: PT017 - most do not refuse
            return
        assert AGAIN["content"] in prompt
        if subject.supports_tools and "tool_calls" in subject.source:
            assert "Rome" in prompt
            assert RESULT["content"] in prompt
            assert '\\"city' not in prompt
            assert "None" not in prompt

    def test_ids_are_those_of_the_text(self, path: Path) -> None:
        subject = published(path)
        messages = [USER, ASSISTANT, AGAIN]
        text = subject.render(messages)
        assert subject.encode(messages) == tokenizer("phi-3").encode(text, parse_special=True)


class TestRoles:
    def test_a_template_without_system_role_gets_it_in_the_first_turn(self) -> None:
        subject = named("google-gemma-2-2b-it")
        assert not subject.supports_system
        prompt = subject.render([SYSTEM, USER])
        assert prompt == subject.render(
            [{"role": "user", "content": f"{SYSTEM['content']}\n\n{USER['content']}"}]
        )

    def test_so_does_one_that_drops_it(self) -> None:
        source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        assert template(source + "{% endfor %}").render([SYSTEM, USER]) == (
            f"{SYSTEM['content']}\n\n{USER['content']}"
        )

    def test_turns_of_one_role_are_merged_where_they_have_to_alternate(self) -> None:
        subject = named("google-gemma-2-2b-it")
        merged = subject.render([{"role": "user", "content": "one\n\ntwo"}])
        one, two = ({"role": "user", "content": text} for text in ("one", "two"))
        assert subject.render([one, two]) == merged

    def test_turns_of_one_role_are_left_alone_elsewhere(self) -> None:
        prompt = template(CHATML).render([USER, AGAIN])
        assert prompt.count("<|im_start|>user") == 2

    def test_a_conversation_that_cannot_be_mended_is_refused_in_the_templates_words(self) -> None:
        with pytest.raises(
            TemplateRenderError, match="Conversation roles must alternate"
        ) as caught:
            named("google-gemma-2-2b-it").render([ASSISTANT, USER])
        assert isinstance(caught.value, RequestError)
        assert caught.value.param == "messages"

    def test_developers_speak_as_the_system(self) -> None:
        developer = {**SYSTEM, "role": "developer"}
        subject = named("Qwen-Qwen2.5-7B-Instruct")
        assert subject.render([developer, USER]) == subject.render([SYSTEM, USER])

    def test_developers_speak_for_themselves_where_the_template_knows_them(self) -> None:
        source = "{% for m in messages %}{{ m.role }},{% endfor %}{{ 'developer' }}"
        developer = {**SYSTEM, "role": "developer"}
        assert template(source).render([developer, USER]).startswith("developer,")

    def test_late_system_messages_move_to_the_front_where_they_have_to(self) -> None:
        source = (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System first!') }}{% endif %}[{{ m.role }}:{{ m.content }}]"
            "{% endfor %}"
        )
        prompt = template(source).render([USER, SYSTEM, ASSISTANT])
        assert prompt.startswith("[system:Answer in verse.][user:")


class TestContent:
    def test_parts_become_text(self) -> None:
        parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "<b>up</b>?"}]
        subject = named("Qwen-Qwen2.5-7B-Instruct")
        assert subject.render([{"role": "user", "content": parts}]) == subject.render([USER])

    def test_text_becomes_parts_where_the_template_wants_them(self) -> None:
        source = (
            "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
        )
        assert template(source).render([SYSTEM, USER]) == "[Answer in verse.][What is <b>up</b>?]"

    def test_other_parts_are_refused(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        with pytest.raises(RequestError, match="'image_url'"):
            template(CHATML).render([{"role": "user", "content": [image]}])

    @pytest.mark.parametrize(
        "message",
        [
            "text",
            {"content": "x"},
            {"role": 1},
            {"role": "user", "content": 5},
            {"role": "user", "content": ["x"]},
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "assistant", "tool_calls": "x"},
            {"role": "assistant", "tool_calls": [{"id": "x"}]},
            {"role": "assistant", "tool_calls": [{"id": ["x"], "function": {}}]},
        ],
    )
    def test_what_is_no_message_is_refused(self, message: Any) -> None:
        with pytest.raises(RequestError):
            template(CHATML).render([message])

    def test_nesting_has_an_end(self) -> None:
        deep: Any = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(TemplateRenderError, match="too deeply"):
            template(CHATML).render([{"role": "user", "content": "x", "extra": deep}])

    def test_half_a_surrogate_pair_is_replaced(self) -> None:
        encode = template(CHATML).encode
        half, whole = ({"role": "user", "content": text} for text in ("a\ud800", "a\ufffd"))
        assert encode([half]) == encode([whole])

    def test_nothing_is_not_none(self) -> None:
        assert "None" not in template(CHATML).render([{"role": "assistant", "content": None}])

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        messages = [SYSTEM, USER, CALL, RESULT]
        before = json.dumps(messages)
        named("google-gemma-4-31B-it").render(messages, tools=[TOOL])
        assert json.dumps(messages) == before


class TestCalls:
    def test_arguments_are_objects_or_text_as_the_template_wants(self) -> None:
        loop = "{% for m in messages %}{% for c in m.tool_calls %}"
        end = "{% endfor %}{% endfor %}"
        as_object = f"{loop}{{{{ c.function.arguments|tojson }}}}{end}"
        as_text = f"{loop}{{{{ 'A' + c.function.arguments }}}}{end}"
        items = (
            f"{loop}{{% for k, v in c.function.arguments.items() %}}{{{{ k ~ v }}}}{{% endfor %}}"
        )
        assert template(as_object).render([USER, CALL]) == '{"city": "Rome"}'
        assert template(as_text).render([USER, CALL]) == 'A{"city": "Rome"}'
        assert template(items + end).render([USER, CALL]) == "cityRome"

    def test_arguments_that_are_no_json_stay_text(self) -> None:
        source = "{% for m in messages %}{{ m.tool_calls|tojson }}{% endfor %}"
        call = json.loads(json.dumps(CALL))
        call["tool_calls"][0]["function"]["arguments"] = "{broken"
        assert '"arguments": "{broken"' in template(source).render([call])

    def test_results_know_the_name_of_their_tool(self) -> None:
        source = "{% for m in messages %}{{ m.role }}={{ m.name|default('-') }} {% endfor %}"
        prompt = template(source).render([USER, CALL, RESULT])
        assert prompt == "user=- assistant=- tool=get_weather "


class TestVariables:
    def test_reach_the_template(self) -> None:
        source = "{{ enable_thinking }} {{ documents[0].title }} {{ tools }} {{ bos_token }}"
        prompt = template(source).render([USER], documents=[{"title": "T"}], enable_thinking=False)
        assert prompt == "False T None <s>"

    def test_other_names_of_tools(self) -> None:
        source = "{{ xml_tools[0].function.name }} {{ functions }}"
        prompt = template(source).render([USER], tools=[TOOL])
        assert prompt == f"get_weather {json.dumps([TOOL], indent=2)}"
        assert template("{{ functions }}{{ xml_tools is defined }}").render([USER]) == "True"

    def test_thinking_can_be_switched_off(self) -> None:
        subject = named("Qwen-Qwen3-0.6B")
        assert "<think>" not in subject.render([USER])
        assert subject.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


class TestFiles:
    Make = Callable[[Mapping[str, Any]], ChatTemplate]

    @pytest.fixture
    def load(self, tmp_path: Path) -> Make:
        def load(keys: Mapping[str, Any]) -> ChatTemplate:
            path = write_vocabulary(tmp_path / "v.gguf", {**byte_level(), **keys})
            with GGUFFile.open(path) as file:
                return ChatTemplate.load(file, load_tokenizer(file))

        return load

    def test_the_template_of_the_file(self, load: Make) -> None:
        subject = load({"tokenizer.chat_template": "{{ messages[0].content }}"})
        assert (subject.name, subject.source) == ("default", "{{ messages[0].content }}")
        assert subject.render([USER]) == USER["content"]

    def test_none_means_chatml(self, load: Make, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            subject = load({})
        assert "ChatML" in caplog.text
        assert subject.name == "chatml"
        assert subject.render([USER]) == (
            "<|im_start|>user\nWhat is <b>up</b>?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_named_templates_are_for_tools_and_documents(self, load: Make) -> None:
        subject = load(
            {
                "tokenizer.chat_template": "plain {{ messages|map(attribute='content')|join }}",
                "tokenizer.chat_template.tool_use": "tools {{ tools[0].function.name }}",
                "tokenizer.chat_template.rag": "rag {{ documents[0] }}",
                "tokenizer.chat_templates": ["tool_use", "rag"],
            }
        )
        assert subject.render([USER]).startswith("plain")
        assert subject.render([USER], tools=[]).startswith("plain")
        assert subject.render([USER], tools=[TOOL]) == "tools get_weather"
        assert subject.render([USER], documents=["d"]) == "rag d"  # type: ignore[list-item]
        assert subject.supports_tools

    @pytest.mark.parametrize("broken", ["{% if %}", 7])
    def test_a_broken_one_is_an_error_of_the_file(self, load: Make, broken: Any) -> None:
        with pytest.raises(ChatTemplateError):
            load({"tokenizer.chat_template": broken})


class TestBos:
    BOS = "<|bos|>"

    @pytest.mark.parametrize("source", ["{{ bos_token }}x", "x", "<|bos|>x"])
    @pytest.mark.parametrize("wanted", [True, False])
    def test_once_at_most(self, tmp_path: Path, source: str, wanted: bool) -> None:
        keys = byte_level({self.BOS: CONTROL}, bos_token_id=256, add_bos_token=wanted)
        subject = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", keys))
        ids = ChatTemplate({"default": source}, subject).encode([USER])
        x = ord("x") - ord("!")
        assert ids == ([256, x] if wanted or source != "x" else [x])
