"""What the grammars let through is what the parser reads, and what the templates write."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from localllm.engine.vocabulary import Vocabulary
from localllm.grammar import GrammarSpec
from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tokenizer import Tokenizer, load_tokenizer
from localllm.text.tools.events import ParsedAnswer
from localllm.text.tools.formats import AnyFormat, ChannelFormat, ToolFormat
from localllm.text.tools.grammar import Calls, answer_grammar, call_grammar
from localllm.text.tools.parser import OutputParser
from localllm.text.tools.schema import Tool
from localllm.text.tools.table import FORMATS
from tests.text.tools.recorded import TOOLS, Recorded, all_recorded
from tests.text.vocabularies import CONTROL, byte_level, tokenizer, write_vocabulary

THINK = ReasoningFormat("<think>", "</think>")
NO_FREE_TEXT = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", 'Sao "Paulo"', "a, b"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 20},
                "units": {"type": "array", "items": {"enum": ["C", "F"], "type": "string"},
                          "maxItems": 2},
                "wind": {"type": "boolean"},
            },
            "required": ["days"],
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
)  # fmt: skip
# Random thinking would not end.
WITHOUT_THINKING = [
    replace(format, thinking=("", "")) if isinstance(format, ChannelFormat) else format
    for format in FORMATS
]
EACH = pytest.mark.parametrize("format", WITHOUT_THINKING, ids=lambda format: format.name)
# Python's literals, escapes and line breaks, which the grammars do not write.
OTHER_SPELLINGS = (
    *("ByteDance-Seed-OSS", "LFM2.5-8B-A1B", "Reka-Edge", "openbmb-MiniCPM5-1B"),
    *("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    *("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
)


@cache
def vocabulary(subject: Tokenizer) -> Vocabulary:
    return Vocabulary(lambda: subject, subject.vocab_size)


def matcher(grammar: str | None, subject: Tokenizer) -> LLMatcher:
    assert grammar is not None
    found = LLMatcher(
        vocabulary(subject).for_grammars, LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    assert not found.is_error(), found.get_error() + grammar
    return found


def accepts(grammar: str | None, subject: Tokenizer, text: str) -> bool:
    found = matcher(grammar, subject)
    ids = subject.encode(text, add_special=False, parse_special=True)
    if found.validate_tokens(ids) < len(ids):
        return False
    found.consume_tokens(ids)
    return found.is_accepting()


def walk(grammar: str | None, subject: Tokenizer, seed: int) -> str:
    """A random text of the grammar, control tokens as they are written."""
    rng = random.Random(seed)
    found = matcher(grammar, subject)
    mask = np.zeros((subject.vocab_size + 31) // 32, np.int32)
    ids: list[int] = []
    while not found.is_stopped() and len(ids) < 2000:
        if found.is_accepting() and rng.random() < 0.3:
            break
        found.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: subject.vocab_size]
        allowed = [int(i) for i in np.flatnonzero(bits) if i not in subject.eog_ids]
        if not allowed:
            break
        ids.append(rng.choice(allowed))
        assert found.consume_token(ids[-1])
    assert found.is_accepting(), subject.decode(ids, skip_special=False)
    return subject.decode(ids, skip_special=False, continuation=True)


def parsed(format: AnyFormat, text: str) -> ParsedAnswer:
    parser = OutputParser(format, NO_FREE_TEXT)
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert "days" in arguments
    assert arguments.keys() <= {"city", "days", "units", "wind"}
    assert type(arguments["days"]) is int
    assert 0 <= arguments["days"] <= 20
    assert arguments.get("city", "Rome") in ("Rome", 'Sao "Paulo"', "a, b")
    assert type(arguments.get("wind", True)) is bool
    assert set(arguments.get("units", ())) <= {"C", "F"}


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    keys = byte_level({"<|endoftext|>": CONTROL}, eos_token_id=256)
    return load_tokenizer(write_vocabulary(path, keys))


@EACH
def test_fault_04_required_calls_are_calls(format: AnyFormat, bytes_only: Tokenizer) -> None:
    grammar = call_grammar(Calls(format, NO_FREE_TEXT), bytes_only)
    for seed in range(4):
        text = walk(grammar, bytes_only, seed)
        answer = parsed(format, text)
        assert answer.calls, text
        assert answer.content == "", text
        for call in answer.calls:
            check_arguments(call.name, json.loads(call.arguments))


@EACH
def test_fault_04_one_named_call(format: AnyFormat, bytes_only: Tokenizer) -> None:
    grammar = call_grammar(Calls(format, NO_FREE_TEXT[:1], single=True), bytes_only)
    for seed in range(3):
        (call,) = parsed(format, walk(grammar, bytes_only, seed)).calls
        assert call.name == "get_weather"
        check_arguments(call.name, json.loads(call.arguments))


@pytest.mark.parametrize("answer", all_recorded(), ids=lambda answer: answer.template)
def test_a_recorded_answer_may_be_generated(answer: Recorded) -> None:
    subject = tokenizer("gpt-2")
    grammar = call_grammar(Calls(answer.format, TOOLS, required=False), subject)
    if grammar is None:
        pytest.skip("a call in this format is only known when it is complete")
    assert accepts(grammar, subject, answer.text) != (answer.template in OTHER_SPELLINGS)


HERMES = next(format for format in FORMATS if format.name == "hermes")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Just text.", True),
        (f"Let me see.\n{CALL}\n{CALL}\nDone.", True),
        ('<tool_call>\n{"name": "never", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>', False),
        ("<tool_call> is a tag.", False),
    ],
)
def test_a_call_that_begins_in_any_text_is_a_right_one(text: str, allowed: bool) -> None:
    subject = tokenizer("gpt-2")
    grammar = call_grammar(Calls(HERMES, TOOLS, required=False), subject)
    assert accepts(grammar, subject, text) == allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Just text, no <think>.", True),
        (f"Let me see.\n{CALL}\n{CALL}\nDone.", True),
        (f"\n<think>\nA <tool_call> it is?\n</think>\n\nSo: {CALL}", True),
        ("<think>\nHm.\n</think>\n\nNo.", True),
        ("<think>\nHm.\n</think>\n\n<tool_call> is a tag.", False),
        ("<tool_call> is a tag.", False),
        (f"{CALL}\n<tool_call> is a tag.", False),
    ],
)
def test_fault_08_calls_spoken_of_in_thinking_are_none(text: str, allowed: bool) -> None:
    subject = tokenizer("gpt-2")
    calls = Calls(HERMES, TOOLS, required=False)
    grammar = call_grammar(calls, subject, THINK, Thinking.POSSIBLE)
    assert accepts(grammar, subject, text) == allowed


HARMONY_CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("llama-3", '{"name": "now", "parameters": {}}', True),
        ("llama-3", '{"name": "never", "parameters": {}}', False),
        ("llama-3", '{"names": ["a"]}', True),
        ("llama-3", 'Call {"name": "never"}!', True),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY_CALL}{{}}<|call|>", True),
        ("harmony", HARMONY_CALL + '{"x": 1}', False),
        ("harmony", HARMONY_CALL.replace("now", "never") + "{}", False),
        ("harmony", "<|channel|>final<|message|>Just text.", True),
        ("functionary-v3.1", "Text. <function=now>{}</function>", True),
        ("functionary-v3.1", "Text. <function=never>{}</function>", False),
    ],
)  # fmt: skip
def test_calls_without_a_mark_of_their_own(name: str, text: str, allowed: bool) -> None:
    subject = tokenizer("gpt-2")
    format = next(format for format in FORMATS if format.name == name)
    grammar = call_grammar(Calls(format, TOOLS, required=False), subject)
    assert accepts(grammar, subject, text) == allowed


def test_no_second_call_where_one_is_wanted() -> None:
    subject = tokenizer("gpt-2")
    for required in (True, False):
        grammar = call_grammar(Calls(HERMES, TOOLS, required, single=True), subject)
        assert accepts(grammar, subject, CALL)
        assert not accepts(grammar, subject, f"{CALL}\n{CALL}")


def test_fault_08_thinking_comes_before_the_grammar() -> None:
    subject = tokenizer("gpt-2")
    calls = Calls(HERMES, TOOLS)
    possible = call_grammar(calls, subject, THINK, Thinking.POSSIBLE)
    assert accepts(possible, subject, f"<think>\nAny {{text}}.\n</think>\n\n{CALL}")
    assert accepts(possible, subject, CALL)
    assert not accepts(possible, subject, "<think>\nAny text.\n</think>\n\nNo.")
    assert accepts(call_grammar(calls, subject, THINK, Thinking.OPEN), subject, f"\n\n{CALL}")
    over = call_grammar(calls, subject, THINK, Thinking.OVER)
    assert not accepts(over, subject, f"<think>\n</think>\n{CALL}")


@pytest.mark.parametrize("name", ["mistral-args", "kimi-k2", "gemma-4", "deepseek-dsml", "lfm2"])
def test_markers_that_are_control_tokens(name: str, tmp_path: Path) -> None:
    """They are asked for by number; texts that look like them are refused."""
    format = next(format for format in FORMATS if format.name == name)
    special = {
        "mistral-args": ["[TOOL_CALLS]", "[ARGS]"],
        "kimi-k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"],
        "gemma-4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
        "deepseek-dsml": ["\uff5cDSML\uff5c"],
        "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    }[name]
    keys = byte_level(dict.fromkeys(["<|endoftext|>", *special], CONTROL), eos_token_id=256)
    subject = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", keys))
    grammar = call_grammar(Calls(format, NO_FREE_TEXT), subject)
    text = walk(grammar, subject, seed=1)
    assert parsed(format, text).calls
    assert accepts(grammar, subject, text)
    as_text = subject.encode(text, add_special=False, parse_special=False)
    assert matcher(grammar, subject).validate_tokens(as_text) < len(as_text)
    free = call_grammar(Calls(format, NO_FREE_TEXT, required=False), subject)
    assert accepts(free, subject, f"Let me see. {text}")
    assert not accepts(free, subject, f"{special[0]} is a token.")


@pytest.mark.parametrize(
    ("thinking", "text", "allowed"),
    [
        (Thinking.OPEN, '<|start|>assistant<|channel|>final<|message|>{"x":1}', True),
        (Thinking.OPEN, f"<|start|>assistant{HARMONY_CALL}{{}}<|call|>", True),
        (Thinking.OPEN, "<|start|>assistant<|channel|>final<|message|>No.", False),
        (Thinking.POSSIBLE, '<|channel|>final<|message|>{"x":1}', True),
        (
            Thinking.POSSIBLE,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            '<|channel|>final<|message|>{"x":1}',
            True,
        ),
        (Thinking.POSSIBLE, "<|channel|>final<|message|>No.", False),
    ],
)
def test_content_in_channels(thinking: Thinking, text: str, allowed: bool) -> None:
    subject = tokenizer("gpt-2")
    harmony = next(format for format in FORMATS if format.name == "harmony")
    assert isinstance(harmony, ChannelFormat)
    schema = GrammarSpec("json_schema", '{"properties": {"x": {"type": "integer"}}}')
    calls = Calls(harmony, TOOLS, required=False)
    spec = answer_grammar(calls, schema, harmony, subject, harmony.reasoning, thinking)
    assert spec is not None
    assert spec.after == (("<|end|>",) if thinking == Thinking.OPEN else ())
    assert accepts(spec.source, subject, text) == allowed


def test_an_argument_that_cannot_be_enforced_may_be_anything() -> None:
    elsewhere = {"$ref": "https://x.example/y"}
    tool = Tool("f", {"properties": {"x": elsewhere, "n": {"type": "integer"}}, "required": ["x"]})
    subject = tokenizer("gpt-2")
    grammar = call_grammar(Calls(HERMES, [tool]), subject)
    call = CALL.replace("now", "f")
    assert accepts(grammar, subject, call.replace("{}}", '{"x": [1], "n": 1}}'))
    assert not accepts(grammar, subject, call.replace("{}}", '{"x": [1], "n": "1"}}'))
    assert not accepts(grammar, subject, call)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1], "b": "c"}}\n</tool_call>'),
        ("lfm2", '<|tool_call_start|>[f(a=[1], b="c")]<|tool_call_end|>'),
        ("gemma-4", '<|tool_call>call:f{a:[1],b:<|"|>c<|"|>}<tool_call|>'),
        (
            "glm-4",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
        ),
    ],
)
def test_a_tool_that_says_nothing_of_its_arguments_takes_any(name: str, text: str) -> None:
    subject = tokenizer("gpt-2")
    format = next(format for format in FORMATS if format.name == name)
    assert accepts(call_grammar(Calls(format, [Tool("f")]), subject), subject, text)
    (call,) = parsed(format, text).calls
    assert json.loads(call.arguments) == {"a": [1], "b": "c"}


@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({"type": ["string", "null"]}, "bare text", True),
        ({"type": ["string", "null"]}, "null", True),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "bare text", True),
        ({}, "bare text", True),
        ({"enum": [1, 2]}, "1", True),
        ({"enum": [1, 2]}, "bare text", False),
        ({"type": "string", "enum": ["a", "b", None]}, "b", True),
        ({"type": "string", "enum": ["a", "b", None]}, "c", False),
        ({"const": "a"}, "a", True),
        ({"$ref": "#/$defs/x"}, "bare text", True),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, '["y"]', True),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, "[1]", False),
    ],
)
def test_values_between_tags(schema: dict[str, Any], value: str, allowed: bool) -> None:
    subject = tokenizer("gpt-2")
    parameters = {"properties": {"k": schema}, "$defs": {"x": {"type": "string"}}}
    coder = next(format for format in FORMATS if format.name == "qwen3-coder")
    grammar = call_grammar(Calls(coder, [Tool("f", parameters)]), subject)
    text = (
        "<tool_call>\n<function=f>\n<parameter=k>\n"
        f"{value}\n</parameter>\n</function>\n</tool_call>"
    )
    assert accepts(grammar, subject, text) == allowed


@pytest.mark.parametrize("reference", ["#/properties/a", "#/$defs/b", "#"])
def test_references_mean_the_same_where_each_argument_has_its_own_rule(
    bytes_only: Tokenizer, reference: str
) -> None:
    of_a = {"type": "integer", "minimum": 5, "maximum": 9}
    tool = Tool(
        "f",
        {
            "type": "object",
            "properties": {"a": of_a, "c": {"type": "array", "items": {"$ref": reference}}},
            "required": ["c"],
            "$defs": {"b": of_a},
        },
    )
    format = next(one for one in FORMATS if one.name == "qwen3-coder")
    grammar = call_grammar(Calls(format, [tool], single=True), bytes_only)

    def takes(value: str) -> bool:
        text = f"<tool_call>\n<function=f>\n<parameter=c>\n{value}\n</parameter>\n"
        return accepts(grammar, bytes_only, f"{text}</function>\n</tool_call>")

    right, wrong = ('[{"c": []}]', "[7]") if reference == "#" else ("[7]", "[3]")
    assert takes(right)
    assert not takes(wrong)


@pytest.mark.parametrize("name", ["gemma-4", "lfm2", "hermes", "qwen3-coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a", 1, None, True, "b c"]},
        {"const": ["a", {"b": 2}]},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 3, "maximum": 4}]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    ],
)
def test_arguments_match_their_schema_in_every_notation(
    bytes_only: Tokenizer, name: str, schema: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = Tool("f", parameters)
    format = next(one for one in FORMATS if one.name == name)
    grammar = call_grammar(Calls(format, [tool], single=True), bytes_only)
    for seed in range(5):
        parser = OutputParser(format, [tool])
        answer = ParsedAnswer()
        answer.add(parser.push(walk(grammar, bytes_only, seed)))
        answer.add(parser.finish())
        (call,) = answer.calls
        jsonschema.validate(json.loads(call.arguments), parameters)


def test_python_calls_keep_to_the_length_of_texts(bytes_only: Tokenizer) -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]})
    format = next(one for one in FORMATS if one.name == "lfm2")
    assert isinstance(format, ToolFormat)
    grammar = call_grammar(Calls(format, [tool], single=True), bytes_only)
    text = f'{format.opens}[f(a="%s")]{format.closes}'
    assert accepts(grammar, bytes_only, text % "abc")
    assert not accepts(grammar, bytes_only, text % "abcd")
    assert not accepts(grammar, bytes_only, text.replace('"', "'") % "abcd")
