"""The rules of one call, by the form of its body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localllm.text.tools.formats import (
    GEMMA_QUOTE,
    Body,
    GemmaCall,
    JsonCall,
    KeyedCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from localllm.text.tools.lark import Rules, quoted
from localllm.text.tools.schema import Tool, is_text, may_be_text, texts_in

_KEY = r"/[^<>\"'=:,{}()\s]+/"
_LIMITS_OF_TEXT = frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength"})
_PYTHON_TEXT = r"/'([^'\\\n]|\\['\\nrt])*'/"


def call_rule(body: Body, tool: Tool, rules: Rules, before: str, after: str) -> str:
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
            if tool.takes_anything and not arguments:
                pair = f'{_KEY} "=" {rules.json({})}'
                inner = f'({pair} (", " {pair})*)?'
            return _around(f"{before}{tool.name}(", inner, ")" + after, rules)
        case GemmaCall():
            value = _gemma_object(tool.parameters, rules)
            if tool.takes_anything and not tool.properties:
                value = rules.recursive(lambda value: _gemma_any(value, rules))
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
        as_text = may_be_text(schema)
        end = body.text_key if as_text and body.text_key else body.key[1]
        start = rules.words.literal(body.key[0] + key + end + body.value[0], loose=body.loose)
        value = _tagged_value(body, schema, as_text, rules)
        arguments.append((rules.rule(f"{start} {value}"), key in tool.required))
    known = rules.in_order(arguments, "")
    if not tool.takes_anything:
        return known
    literal = rules.words.literal
    key = f"{literal(body.key[0])} {_KEY} {literal(body.key[1] + body.value[0])}"
    return f"{known} ({key} {_tagged_value(body, {}, True, rules)})*"


def _tagged_value(body: TaggedCall, schema: Mapping[str, Any], as_text: bool, rules: Rules) -> str:
    close = body.value[1]
    if not as_text:
        return f"{rules.json(schema)} {rules.words.literal(close, loose=body.loose)}"
    if options := texts_in(schema):
        choices = (rules.words.literal(option + close, loose=body.loose) for option in options)
        return rules.rule(" | ".join(choices))
    tail = close[len(close.rstrip()) :]
    return f"{rules.text_until(close.rstrip())} {rules.words.literal(tail, loose=body.loose)}"


def _python_value(schema: Mapping[str, Any], rules: Rules) -> str:
    if is_text(schema) and not _LIMITS_OF_TEXT & schema.keys():
        return f"({_PYTHON_TEXT} | {rules.json({'type': 'string'})})"
    return rules.json(schema)


def _gemma_value(schema: Mapping[str, Any], rules: Rules) -> str:
    kind, options = schema.get("type"), schema.get("anyOf")
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return f"({' | '.join(_gemma_literal(value, rules) for value in values)})"
    if isinstance(kind, list):
        options = [{**schema, "type": one} for one in kind]
    if options and (kind is None or isinstance(kind, list)):
        return rules.rule(" | ".join(_gemma_value(one, rules) for one in options))
    if is_text(schema):
        return f"{rules.words.literal(GEMMA_QUOTE)} {rules.text_until(GEMMA_QUOTE)}"
    if kind == "object" and isinstance(schema.get("properties"), dict):
        return _gemma_object(schema, rules)
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        item = rules.rule(_gemma_value(items, rules))
        return _gemma_list(item, schema.get("minItems") or 0, schema.get("maxItems"))
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json(schema)
    return rules.recursive(lambda value: _gemma_any(value, rules))


def _gemma_any(value: str, rules: Rules) -> str:
    text = f"{rules.words.literal(GEMMA_QUOTE)} {rules.text_until(GEMMA_QUOTE)}"
    scalar = rules.json({"type": ["number", "boolean", "null"]})
    pair = f'{_KEY} ":" {value}'
    return f'{text} | {scalar} | "{{" ({pair} ("," {pair})*)? "}}" | {_gemma_list(value)}'


def _gemma_literal(value: Any, rules: Rules) -> str:
    match value:
        case str():
            quote = rules.words.literal(GEMMA_QUOTE)
            return f"{quote} {quoted(value)} {quote}"
        case list():
            items = ' "," '.join(_gemma_literal(item, rules) for item in value)
            return f'"[" {items} "]"'
        case dict():
            members = (f"{quoted(k + ':')} {_gemma_literal(v, rules)}" for k, v in value.items())
            inner = ' "," '.join(members)
            return f'"{{" {inner} "}}"'
        case _:
            return quoted(json.dumps(value))


def _gemma_list(item: str, least: int = 0, most: int | None = None) -> str:
    if most == 0:
        return '"[]"'
    more = f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
    items = item if most == 1 else f'{item} ("," {item}){more}'
    return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _gemma_object(schema: Mapping[str, Any], rules: Rules) -> str:
    required = schema.get("required") or ()
    members = [
        (f"{quoted(key + ':')} {_gemma_value(member, rules)}", key in required)
        for key, member in (schema.get("properties") or {}).items()
        if isinstance(member, dict)
    ]
    return f'"{{" {rules.in_order(members, quoted(","))} "}}"'
