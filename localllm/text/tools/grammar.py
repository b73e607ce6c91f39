"""The grammar of an answer that calls tools: the same data that `calls` reads, as rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammars import compile_problem, lark_rule, literal_pattern
from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools.call_rules import call_rule
from localllm.text.tools.formats import AnyFormat, ChannelFormat, JsonCall, ToolFormat
from localllm.text.tools.lark import TEXT, Rules, Words, token
from localllm.text.tools.schema import Tool

_MOST_CALLS = 32
_SPACE = r"/\s{0,4}/ "


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
    elif wanted:
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
        may_think = reasoning if thinking == Thinking.POSSIBLE else None
        return _free(calls, tools, rules, may_think)
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
        if thinking == Thinking.OPEN:
            return f"{rules.words.literal(format.channels.starts)} "
        opens, closes = format.thinking
        return f"({rules.words.literal(opens)} {rules.text_until(closes)})? "
    if reasoning is None or thinking == Thinking.OVER:
        return ""
    if thinking == Thinking.OPEN:
        return _SPACE
    opens = rules.words.literal(reasoning.opens.strip())
    return f"({opens} {rules.text_until(reasoning.closes.strip())} {_SPACE})? "


def _compilable(tool: Tool) -> Tool:
    """The tool, with anything as an argument, or any arguments, where no more can be enforced: see
    `check_enforceable` for those where that is not enough."""
    closed = tool.closed
    if _compiles(closed.parameters):
        return closed
    arguments = {key: tool.argument(key) for key in tool.properties}
    loose: dict[str, Any] = {
        "type": "object",
        "properties": {k: schema if _compiles(schema) else {} for k, schema in arguments.items()},
        "required": sorted(tool.required & arguments.keys()),
    }
    return replace(tool, parameters=loose if _compiles(loose) else {"type": "object"})


def _compiles(schema: Mapping[str, Any]) -> bool:
    return _source_compiles(json.dumps({**schema, "x-guidance": {"lenient": True}}))


@lru_cache(1024)
def _source_compiles(schema: str) -> bool:
    """The same tools come with every request of a program."""
    from llguidance import LLMatcher

    return not compile_problem(LLMatcher.grammar_from_lark(f"start: %json {schema}"))


def _free(
    calls: Calls, tools: Sequence[Tool], rules: Rules, thinking: ReasoningFormat | None
) -> str | None:
    """Any text, in which calls that begin go on as calls, perhaps with `thinking` before it."""
    match calls.format:
        case ChannelFormat() as channels:
            return _free_message(channels, tools, rules)
        case format if not (format.opens or format.begins):
            return _bare_calls(format, tools, rules)
        case format:
            return _free_calls(format, tools, calls.single, rules, thinking)


def _free_message(format: ChannelFormat, tools: Sequence[Tool], rules: Rules) -> str | None:
    """A message is a call by its header; None where headers do not begin so as to tell."""
    before = format.call_header[0]
    if format.inner or not before.strip() or rules.words.parts(before) != [before]:
        return None
    head = rules.rule(_up_to(before), "[lazy]")
    headless = replace(format, call_header=("", format.call_header[1]))
    return rules.source(f"{head} {_message_calls(headless, tools, True, rules)} | {TEXT}")


def _bare_calls(format: ToolFormat, tools: Sequence[Tool], rules: Rules) -> str | None:
    """An answer that begins as a call is one, from its first character to its last."""
    if not isinstance(format.body, JsonCall):
        return None
    answer = _all_calls(format, tools, True, rules)
    other = rules.terminal(f'{TEXT} & ~/\\s*\\{{\\s*"{format.body.name_key}"(?s:.*)/')
    return rules.source(f"{answer} | {other}")


def _free_calls(
    format: ToolFormat,
    tools: Sequence[Tool],
    only_one: bool,
    rules: Rules,
    thinking: ReasoningFormat | None,
) -> str | None:
    trigger = rules.words.parts(format.opens or format.begins)[0]
    if isinstance(trigger, int):
        if thinking:
            return None
        text = f"{rules.words.any_but([trigger])}*"
        head = f"{text} {token(trigger)}"
        begun = rules.words.text_of(trigger)
    else:
        text, begun = TEXT, trigger.rstrip()
        head = rules.rule(_up_to(begun), "[lazy]")
    rest = _all_calls(format, tools, only_one or not format.opens, rules, begun)
    call = rules.rule(f"{head} {rest}")
    answer = f"({call} | {text})" if only_one else f"{call}* {text}"
    if not thinking:
        return rules.source(answer)
    thought = _thinking_as_text(thinking, rules)
    if thought is None:
        return None
    # What begins with thinking is that and nothing else, even where a call is spoken of in it.
    no_thought = f"~/\\s*{literal_pattern(thinking.opens.strip())}(?s:.*)/"
    first = rules.rule(rules.terminal(f"{_up_to(begun)} & {no_thought}"), "[lazy]")
    plain = rules.terminal(f"{TEXT} & {no_thought}")
    others = "" if only_one else answer
    return rules.source(f"{thought} {answer} | {first} {rest} {others} | {plain}")


def _up_to(text: str) -> str:
    return f"/(?s:.*){literal_pattern(text)}/"


def _thinking_as_text(reasoning: ReasoningFormat, rules: Rules) -> str | None:
    """None where its marks are control tokens."""
    opens, closes = reasoning.opens.strip(), reasoning.closes.strip()
    if [rules.words.parts(mark) for mark in (opens, closes)] != [[opens], [closes]]:
        return None
    return rules.rule(f"/\\s*{literal_pattern(opens)}(?s:.*){literal_pattern(closes)}/", "[lazy]")


def _all_calls(
    format: ToolFormat, tools: Sequence[Tool], single: bool, rules: Rules, begun: str = ""
) -> str:
    """One call or several; what is `begun` of their text is there already."""
    opening = format.opens + ("[" if format.listed else "") + format.begins
    closing = ("\n]" if "\n" in format.begins else "]") if format.listed else ""

    def one(before: str) -> str:
        calls = [call_rule(format.body, tool, rules, before, format.ends) for tool in tools]
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
