"""The grammar of an answer that calls tools: the same data that `calls` reads, as rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammars import compile_problem, lark_rule
from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools.formats import (
    GEMMA_QUOTE,
    AnyFormat,
    Body,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    KeyedCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)
from localllm.text.tools.lark import TEXT, Rules, Words, pattern, quoted, token
from localllm.text.tools.schema import Tool, is_text

_MOST_CALLS = 32
_SPACE = r"/\s{0,4}/ "
_KEY = r"/[^<>\"'=:,{}()\s]+/"
_PYTHON_TEXT = r"/'([^'\\\n]|\\['\\nrt])*'/"


@dataclass(frozen=True)
class Calls:
    """What an answer has to call. `single`: one call and no more. `required`: nothing but calls."""

    format: AnyFormat
    tools: Sequence[Tool]
    required: bool = True
    single: bool = False


def answer_grammar(
    wanted: Calls | None,
    content: GrammarSpec | None,
    format: AnyFormat | None,
    tokenizer: Tokenizer,
    reasoning: ReasoningFormat | None = None,
    thinking: Thinking = Thinking.OVER,
) -> GrammarSpec | None:
    """What an answer has to obey, after its thinking, when it may or must call tools and what else
    it says obeys `content`. RequestError where that cannot be put together."""
    if wanted and wanted.required:
        source = call_grammar(wanted, tokenizer, reasoning, thinking)
    elif content is not None:
        source = _content_or_calls(wanted, content, format, tokenizer, reasoning, thinking)
        if source is None:
            after = (reasoning.closes,) if reasoning and thinking == Thinking.OPEN else ()
            return replace(content, after=after)
    elif wanted and not (reasoning and thinking == Thinking.POSSIBLE):
        source = call_grammar(wanted, tokenizer, reasoning, thinking)
    else:
        source = None
    if source is None:
        return None
    after = (reasoning.closes,) if reasoning and thinking == Thinking.OPEN else ()
    return GrammarSpec("lark", source, after)


def _content_or_calls(
    wanted: Calls | None,
    content: GrammarSpec,
    format: AnyFormat | None,
    tokenizer: Tokenizer,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
) -> str | None:
    """None where the grammar of the content is enough."""
    in_channels = isinstance(format, ChannelFormat)
    may_think = reasoning is not None and thinking == Thinking.POSSIBLE
    if not (wanted or in_channels or may_think):
        return None
    rules = Rules(Words(tokenizer))
    body = lark_rule(content)
    if body is None:
        if not wanted:
            return None
        raise RequestError(
            "tools: calls cannot be combined with a grammar for the content",
            param="tools",
            code="unsupported_parameter",
        )
    answer = rules.rule(body)
    before = _think(format, reasoning, thinking, rules)
    if isinstance(format, ChannelFormat):
        answer = f"{rules.words.literal(format.content_header)} {answer}"
    if wanted:
        tools = [_compilable(tool) for tool in wanted.tools]
        answer = f"({answer} | {_calls_of(wanted, tools, rules)})"
    return rules.source(before + answer)


def call_grammar(
    calls: Calls,
    tokenizer: Tokenizer,
    reasoning: ReasoningFormat | None = None,
    thinking: Thinking = Thinking.OVER,
) -> str | None:
    """A grammar in Lark; None where nothing is to be enforced.

    It holds after the thinking that a prompt has begun (`Thinking.OPEN`), and from the beginning,
    with thinking before the answer or not, where that is only possible. Without `required` the
    answer may be any text; a call that begins in it has to be a right one.
    """
    rules = Rules(Words(tokenizer))
    tools = [_compilable(tool) for tool in calls.tools]
    if not calls.required:
        return _free(calls, tools, rules)
    before = _think(calls.format, reasoning, thinking, rules)
    return rules.source(before + _calls_of(calls, tools, rules))


def _calls_of(calls: Calls, tools: Sequence[Tool], rules: Rules) -> str:
    match calls.format:
        case ChannelFormat() as format:
            return _message_calls(format, tools, calls.single, rules)
        case format:
            return _all_calls(format, tools, calls.single, rules)


def _think(
    format: AnyFormat | None, reasoning: ReasoningFormat | None, thinking: Thinking, rules: Rules
) -> str:
    """The thinking that may come first."""
    if isinstance(format, ChannelFormat) and format.thinking[0]:
        opens, closes = format.thinking
        return f"({rules.words.literal(opens)} {rules.text_until(closes)})? "
    if reasoning is None or thinking == Thinking.OVER:
        return ""
    if thinking == Thinking.OPEN:
        return _SPACE
    opens = rules.words.literal(reasoning.opens.strip())
    return f"({opens} {rules.text_until(reasoning.closes.strip())} {_SPACE})? "


def _compilable(tool: Tool) -> Tool:
    """The tool, with any object as its arguments where nothing else can be enforced."""
    parameters = dict(tool.parameters)
    if isinstance(parameters.get("properties"), dict):
        parameters.setdefault("additionalProperties", False)
    parameters["type"] = "object"
    rules = [f"start: %json {json.dumps(parameters | {'x-guidance': {'lenient': True}})}"]
    from llguidance import LLMatcher

    if compile_problem(LLMatcher.grammar_from_lark("\n".join(rules))):
        parameters = {"type": "object"}
    return replace(tool, parameters=parameters)


def _free(calls: Calls, tools: Sequence[Tool], rules: Rules) -> str | None:
    """Any text, in which calls that begin go on as calls."""
    format = calls.format
    if isinstance(format, ChannelFormat) or not (format.opens or format.begins):
        return None
    trigger = rules.words.parts(format.opens or format.begins)[0]
    if isinstance(trigger, int):
        text = f"{rules.words.any_but([trigger])}*"
        head = f"{text} {token(trigger)}"
        begun = rules.words.text_of(trigger)
    else:
        text, begun = TEXT, trigger.rstrip()
        head = rules.rule(f"/(?s:.*){pattern(begun)}/", "[lazy]")
    single = calls.single or not format.opens
    rest = _all_calls(format, tools, single, rules, begun)
    call = rules.rule(f"{head} {rest}")
    return rules.source(f"{call} | {text}" if calls.single else f"{call}* {text}")


def _all_calls(
    format: ToolFormat, tools: Sequence[Tool], single: bool, rules: Rules, begun: str = ""
) -> str:
    """One call or several; what is `begun` of their text is there already."""
    opening = format.opens + ("[" if format.listed else "") + format.begins
    closing = ("\n]" if "\n" in format.begins else "]") if format.listed else ""

    def one(before: str) -> str:
        calls = [_call(format.body, tool, rules, before, format.ends) for tool in tools]
        return rules.rule(" | ".join(calls))

    first = one(opening.removeprefix(begun))
    close = rules.words.literal(closing + format.closes)
    if single or not format.parallel:
        return f"{first} {close}"
    more = one(format.between + format.begins)
    return f"{first} ({more}){{0,{_MOST_CALLS - 1}}} {close}"


def _message_calls(format: ChannelFormat, tools: Sequence[Tool], single: bool, rules: Rules) -> str:
    """A message that calls; several where the format has that."""
    literal = rules.words.literal
    before, after = format.call_header
    calls = []
    for tool in tools:
        if format.inner is None:
            arguments = rules.json(tool.parameters)
        else:
            arguments = _all_calls(format.inner, [tool], True, rules)
        calls.append(f"{literal(f'{before}{tool.name}{after}')} {arguments} {literal(format.ends)}")
    call = rules.rule(" | ".join(calls))
    if single or not format.parallel:
        return call
    more = literal(format.channels.starts)
    return f"{call} ({more} {call}){{0,{_MOST_CALLS - 1}}}"


def _call(body: Body, tool: Tool, rules: Rules, before: str, after: str) -> str:
    """`before` and `after` are in one piece with what they touch: where two texts may come, none
    may be the beginning of the other."""
    literal, name = rules.words.literal, quoted(tool.name)
    match body:
        case JsonCall():
            return _json_call(body, tool, rules, before, after)
        case KeyedCall():
            start = literal(f"{before}{{{name}: ")
            return f"{start} {rules.json(tool.parameters)} {literal('}' + after)}"
        case NamedCall(number_pattern=number):
            start = f"{before}{body.before}{tool.name}"
            if not number:
                return _around(start + body.after, rules.json(tool.parameters), after, rules)
            head = f"{literal(start)} /{number}/ {literal(body.after)}"
            return f"{head} {rules.json(tool.parameters)} {literal(after)}"
        case TaggedCall(loose=loose):
            start = literal(before + body.name[0] + tool.name + body.name[1], loose=loose)
            end = literal(body.end + after, loose=loose)
            return f"{start} {_tagged_arguments(body, tool, rules)} {end}"
        case PythonCall():
            arguments = [
                (f"{quoted(key + '=')} {_python_value(schema, rules)}", key in tool.required)
                for key, schema in _arguments(tool)
            ]
            inner = rules.in_order(arguments, quoted(", "))
            return _around(f"{before}{tool.name}(", inner, ")" + after, rules)
        case GemmaCall():
            value = _gemma_object(tool.parameters, rules)
            return _around(f"{before}call:{tool.name}", value, after, rules)


def _around(before: str, inner: str, after: str, rules: Rules) -> str:
    return f"{rules.words.literal(before)} {inner} {rules.words.literal(after)}"


def _json_call(body: JsonCall, tool: Tool, rules: Rules, before: str, after: str) -> str:
    literal = rules.words.literal
    id = f'/"{body.id_pattern}"/'
    name = f"{quoted(body.name_key)}: {quoted(tool.name)}, {quoted(body.arguments_key)}: "
    arguments = rules.json(tool.parameters)
    if not body.id_key:
        return _around(f"{before}{{{name}", arguments, "}" + after, rules)
    if body.id_first:
        start = literal(f"{before}{{{quoted(body.id_key)}: ")
        return f"{start} {id} {literal(', ' + name)} {arguments} {literal('}' + after)}"
    start = literal(f"{before}{{{name}")
    return (
        f"{start} {arguments} {literal(f', {quoted(body.id_key)}: ')} {id} {literal('}' + after)}"
    )


def _arguments(tool: Tool) -> list[tuple[str, Mapping[str, Any]]]:
    return [(key, tool.argument(key)) for key in tool.properties]


def _tagged_arguments(body: TaggedCall, tool: Tool, rules: Rules) -> str:
    arguments = []
    for key, schema in _arguments(tool):
        as_text = is_text(schema) or not schema
        end = body.text_key if as_text and body.text_key else body.key[1]
        start = rules.words.literal(body.key[0] + key + end + body.value[0], loose=body.loose)
        value = _tagged_value(body, schema, as_text, rules)
        arguments.append((rules.rule(f"{start} {value}"), key in tool.required))
    return rules.in_order(arguments, "")


def _tagged_value(body: TaggedCall, schema: Mapping[str, Any], as_text: bool, rules: Rules) -> str:
    close = body.value[1]
    if not as_text:
        return f"{rules.json(schema)} {rules.words.literal(close, loose=body.loose)}"
    if options := schema.get("enum"):
        choices = (rules.words.literal(option + close, loose=body.loose) for option in options)
        return rules.rule(" | ".join(choices))
    tail = close[len(close.rstrip()) :]
    return f"{rules.text_until(close.rstrip())} {rules.words.literal(tail, loose=body.loose)}"


def _python_value(schema: Mapping[str, Any], rules: Rules) -> str:
    if is_text(schema) and not {"enum", "const", "pattern", "format"} & schema.keys():
        return f"({_PYTHON_TEXT} | {rules.json({'type': 'string'})})"
    return rules.json(schema)


def _gemma_value(schema: Mapping[str, Any], rules: Rules) -> str:
    kind = schema.get("type")
    if is_text(schema):
        quote = rules.words.literal(GEMMA_QUOTE)
        if options := schema.get("enum"):
            return "(" + " | ".join(f"{quote} {quoted(o)} {quote}" for o in options) + ")"
        return f"{quote} {rules.text_until(GEMMA_QUOTE)}"
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return _gemma_object(schema, rules)
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        return _gemma_list(rules.rule(_gemma_value(items, rules)))
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json(schema)
    return rules.recursive(lambda value: _gemma_any(value, rules))


def _gemma_any(value: str, rules: Rules) -> str:
    text = f"{rules.words.literal(GEMMA_QUOTE)} {rules.text_until(GEMMA_QUOTE)}"
    scalar = rules.json({"type": ["number", "boolean", "null"]})
    pair = f'{_KEY} ":" {value}'
    return f'{text} | {scalar} | "{{" ({pair} ("," {pair})*)? "}}" | {_gemma_list(value)}'


def _gemma_list(item: str) -> str:
    return f'"[" ({item} ("," {item})*)? "]"'


def _gemma_object(schema: Mapping[str, Any], rules: Rules) -> str:
    required = schema.get("required") or ()
    members = [
        (f"{quoted(key + ':')} {_gemma_value(member, rules)}", key in required)
        for key, member in (schema.get("properties") or {}).items()
        if isinstance(member, dict)
    ]
    return f'"{{" {rules.in_order(members, quoted(","))} "}}"'
