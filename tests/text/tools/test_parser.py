"""Streamed and whole answers agree, wherever they are cut or end."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.text.reasoning import Thinking
from localllm.text.reasoning import recognise as recognise_reasoning
from localllm.text.tools.events import (
    Arguments,
    CallBegins,
    CallEnds,
    Content,
    Event,
    ParsedAnswer,
    Reasoning,
    joined,
)
from localllm.text.tools.parser import OutputParser
from localllm.text.tools.table import FORMATS
from tests.text.tools.recorded import CITY, TOOLS, Recorded, all_recorded

RECORDED = all_recorded()
EACH = pytest.mark.parametrize("answer", RECORDED, ids=lambda answer: answer.template)
BY_NAME = {format.name: format for format in FORMATS}
THINK = recognise_reasoning("<think></think>")


def events_of(
    answer: Recorded, pieces: Iterable[str], *, cut: bool = False, required: bool = False
) -> list[Event]:
    numbers = iter(range(100))
    parser = OutputParser(
        answer.format,
        TOOLS,
        answer.reasoning,
        answer.thinking,
        lambda: f"id{next(numbers)}",
        required,
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish(cut=cut))


def parse(text: str, format: str | None, thinking: Thinking = Thinking.POSSIBLE) -> ParsedAnswer:
    parser = OutputParser(BY_NAME[format] if format else None, TOOLS, THINK, thinking)
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer


def calls_of(answer: ParsedAnswer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@EACH
class TestRecorded:
    def test_fault_01_the_deltas_of_a_call_are_its_arguments(self, answer: Recorded) -> None:
        """The template's own calls come back: what it wrote, read."""
        events = events_of(answer, answer.text)
        parsed = ParsedAnswer()
        parsed.add(events)
        assert calls_of(parsed) == list(answer.calls)
        begun = [event for event in events if isinstance(event, CallBegins)]
        assert len({event.id for event in begun}) == len(begun) == len(answer.calls)

    def test_fault_03_indices_count_and_calls_do_not_overlap(self, answer: Recorded) -> None:
        open_call, seen = None, 0
        for event in events_of(answer, answer.text):
            match event:
                case CallBegins(index):
                    assert (open_call, index) == (None, seen)
                    open_call, seen = index, seen + 1
                case Arguments(index):
                    assert index == open_call
                case CallEnds(index):
                    assert index == open_call
                    open_call = None
        assert open_call is None

    def test_nothing_of_the_format_is_content(self, answer: Recorded) -> None:
        text = "".join(
            event.text
            for event in events_of(answer, [answer.text])
            if isinstance(event, Content | Reasoning)
        )
        assert set(text) <= set("Let me see.Hmm, the weather.")

    def test_fault_07_streamed_and_whole_answers_agree_at_every_end(self, answer: Recorded) -> None:
        """And a truncated answer calls nothing else than the whole one."""
        whole = ParsedAnswer()
        whole.add(events_of(answer, [answer.text]))
        for end in range(len(answer.text)):
            text = answer.text[:end]
            events = events_of(answer, [text])
            assert events == events_of(answer, [text[i : i + 5] for i in range(0, end, 5)]), text
            part = ParsedAnswer()
            part.add(events)
            for call, full in zip(part.calls, whole.calls, strict=False):
                assert call.name == full.name

    @pytest.mark.parametrize("required", [False, True])
    def test_what_is_cut_off_is_the_beginning_of_the_whole(
        self, answer: Recorded, required: bool
    ) -> None:
        """Arguments too: no `{}` stands for what was still to come. And where calls have to come,
        nothing of their marks is content."""
        whole = ParsedAnswer()
        whole.add(events_of(answer, [answer.text], required=required))
        for end in range(len(answer.text)):
            text = answer.text[:end]
            events = events_of(answer, [text], cut=True, required=required)
            assert events == events_of(answer, text, cut=True, required=required), text
            part = ParsedAnswer()
            part.add(events)
            for call, full in zip(part.calls, whole.calls, strict=False):
                assert full.arguments.startswith(call.arguments), text
            if required:
                assert whole.content.startswith(part.content.rstrip()), text
                assert whole.reasoning.startswith(part.reasoning.rstrip()), text


@given(answer=st.sampled_from(RECORDED), data=st.data())
@settings(deadline=None, max_examples=150)
def test_streamed_and_whole_answers_agree_in_any_pieces(
    answer: Recorded, data: st.DataObject
) -> None:
    size = len(answer.text)
    end = data.draw(st.integers(0, size))
    cuts = sorted(data.draw(st.sets(st.integers(0, end), max_size=12)))
    text = answer.text[:end]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    assert events_of(answer, pieces) == events_of(answer, [text])


@given(
    format=st.sampled_from([*FORMATS, None]),
    parts=st.lists(
        st.one_of(
            st.text("ab{}[]\"':,=()<> \n\\", max_size=6),
            st.sampled_from([mark for format in FORMATS for mark in format.markers]),
            st.sampled_from(['{"name": "now", "arguments": {}}', "get_weather", "<think>"]),
        ),
        max_size=12,
    ),
)
@settings(deadline=None, max_examples=400)
def test_any_text_is_read_to_its_end(format: object, parts: list[str]) -> None:
    """And the same in any pieces, however malformed."""
    text = "".join(parts)

    def run(pieces: Iterable[str]) -> list[Event]:
        parser = OutputParser(format, TOOLS, THINK, new_id=lambda: "id")  # type: ignore[arg-type]
        events = [event for piece in pieces for event in parser.push(piece)]
        return joined(events + parser.finish())

    assert run(text) == run([text]) == run(parts)


@EACH
def test_fault_02_long_arguments_are_not_held_back(answer: Recorded) -> None:
    """Of a text argument, all but what may be the end of it is out at once."""
    parser = OutputParser(answer.format, TOOLS, answer.reasoning, answer.thinking)
    start = answer.text.index("Gr")
    parser.push(answer.text[:start])
    shown = ""
    for character in "Gruesse " * 20:
        shown += "".join(e.text for e in parser.push(character) if isinstance(e, Arguments))
    assert len(shown) >= len("Gruesse " * 20) - len("</parameter>")
    assert CITY[:2] in shown


class TestThinking:
    def test_seeded_from_the_prompt(self) -> None:
        answer = parse("I think.\n</think>\n\nYes.", None, Thinking.OPEN)
        assert (answer.reasoning, answer.content) == ("I think.", "Yes.")

    def test_truncated_inside(self) -> None:
        answer = parse("I think. </thi", None, Thinking.OPEN)
        assert (answer.reasoning, answer.content) == ("I think. </thi", "")

    def test_opened_by_the_model(self) -> None:
        answer = parse("\n<think>\nA\n\nB\n</think>\nYes. ", None)
        assert (answer.reasoning, answer.content) == ("A\n\nB", "Yes. ")

    def test_over_already(self) -> None:
        assert parse("<think> is a tag", None, Thinking.OVER).content == "<think> is a tag"

    def test_a_tag_that_is_spoken_of(self) -> None:
        assert parse("The <think> tag.", None).content == "The <think> tag."

    def test_calls_after_it(self) -> None:
        text = '<think>\nA <tool_call>?\n</think>\n\n<tool_call>\n{"name": "now"}\n</tool_call>'
        answer = parse(text, "hermes")
        assert answer.reasoning == "A <tool_call>?"
        assert calls_of(answer) == [("now", {})]


class TestLeniency:
    @pytest.mark.parametrize(
        ("format", "text"),
        [
            ("hermes", '<tool_call>{"arguments": {"city": "X"}, "name": "get_weather"}'),
            ("hermes", '<tool_call>\n{"name":"get_weather","parameters":{"city":"X"}}\n'),
            ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"X\\"}"}'),
            ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "X"}}}\n</'),
            ("mistral-args", '[TOOL_CALLS]get_weather{"city": "X"}'),
            (
                "qwen3-coder",
                "<tool_call><function=get_weather><parameter=city>X</parameter></function>",
            ),
            ("llama-3", '{"type": "function", "name": "get_weather", "parameters": {"city": "X"}}'),
            ("lfm2", '<|tool_call_start|>[get_weather(city="X")]<|tool_call_end|>'),
            (
                "minicpm",
                '<function name="get_weather"><param name="city"><![CDATA[X]]></param>'
                "</function>",
            ),
            (
                "harmony",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.get_weather <|constrain|>json<|message|>{"city": "X"}',
            ),
        ],
    )  # fmt: skip
    def test_of_what_models_write_beside_the_form(self, format: str, text: str) -> None:
        answer = parse(text, format)
        assert calls_of(answer) == [("get_weather", {"city": "X"})]
        assert answer.content == ""

    @pytest.mark.parametrize(
        "text", ["<tool_call> is a tag", '<tool_call>{"x": 1}', "<tool_call>{]"]
    )
    def test_what_is_no_call_is_content(self, text: str) -> None:
        assert parse(text, "hermes").content == text

    @pytest.mark.parametrize("text", ['{"a": 1}', '{"name": "nobody"}', "{x}", "{", "[1]"])
    def test_json_that_calls_no_tool_is_content(self, text: str) -> None:
        answer = parse(text, "llama-3")
        assert (answer.content, answer.calls) == (text, [])

    def test_values_are_typed_by_the_schema(self) -> None:
        text = (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
            "<parameter=days>\n12\n</parameter>\n<parameter=options>\n{'a': None}\n</parameter>\n"
            "<parameter=other>\nTrue\n</parameter>\n</function>\n</tool_call>"
        )
        expected = {"city": "12", "days": 12, "options": {"a": None}, "other": True}
        assert calls_of(parse(text, "qwen3-coder")) == [("get_weather", expected)]

    @pytest.mark.parametrize(
        ("format", "text", "content", "surely"),
        [
            ("hermes", "1 <", "1 <", "1 "),
            ("hermes", "<tool_c", "<tool_c", ""),
            ("hermes", '<tool_call>\n{"na', "", ""),
            ("hermes", "<thi", "<thi", ""),
            ("llama-3", '{"na', '{"na', ""),
            ("llama-3", '{"name": "get_w', "", ""),
            ("harmony", "<|chan", "<|chan", ""),
        ],
    )
    def test_marks_that_are_cut_off(
        self, format: str, text: str, content: str, surely: str
    ) -> None:
        """Content where they may have been just that, nothing where a call had to come."""
        for required, expected in ((False, content), (True, surely)):
            parser = OutputParser(BY_NAME[format], TOOLS, THINK, required=required)
            answer = ParsedAnswer()
            answer.add(parser.push(text))
            answer.add(parser.finish(cut=True))
            assert (answer.content, answer.reasoning, answer.calls) == (expected, "", [])

    def test_content_after_a_call(self) -> None:
        text = 'A\n<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>\nB\n'
        answer = parse(text, "hermes")
        assert answer.content == "A\n\nB"
        assert calls_of(answer) == [("now", {})]


def test_without_format_or_thinking_text_passes_as_it_is() -> None:
    parser = OutputParser(None)
    assert parser.push(" \n<tool_call> ") + parser.finish() == [Content(" \n<tool_call> ")]
