"""Which schemas of tools are refused, and where they are at fault."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.errors import RequestError
from localllm.server.tool_choice import ToolChoice

PLACE = "tools[0].function.parameters"
NAMED = {"type": "function", "function": {"name": "f"}}


def refusal(schema: Any, choice: Any = "auto", **function: Any) -> str | None:
    """The place that is at fault, of a function with this schema or with one argument of it."""
    definition = {"name": "f", "parameters": schema, **function}
    other = {"type": "function", "function": {"name": "g"}}
    tools = [{"type": "function", "function": definition}, other]
    caught: RequestError | None = None
    try:
        ToolChoice.of(tools, choice, None)
    except RequestError as error:
        caught = error
    if caught is None:
        return None
    assert caught.code == "unsupported_schema"
    assert caught.param is not None
    assert str(caught).startswith(f"{caught.param}: ")
    return caught.param.removeprefix(PLACE)


def argument(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}}


# What no grammar here enforces.
UNSUPPORTED = [
    (argument({"not": {"type": "null"}}), ".properties.x.not"),
    (argument({"type": "array", "uniqueItems": True}), ".properties.x.uniqueItems"),
    (argument({"type": "string", "pattern": "(?=a)b"}), ".properties.x.pattern"),
    (argument({"type": "string", "format": "coin"}), ".properties.x.format"),
    (argument({"$ref": "http://example.com/x"}), ".properties.x.$ref"),
    ({**argument({}), "dependentRequired": {"x": ["y"]}}, ".dependentRequired"),
]
# What is no schema, or one that nothing satisfies.
INVALID = [
    (argument({"type": "integer", "minimum": 3, "maximum": 2}), ".properties.x.minimum"),
    (argument({"minimum": 3, "exclusiveMaximum": 3}), ".properties.x.minimum"),
    (argument({"type": "string", "minLength": 3, "maxLength": 2}), ".properties.x.minLength"),
    (argument({"type": "array", "minItems": 3, "maxItems": 2}), ".properties.x.minItems"),
    (argument({"type": "string", "pattern": "("}), ".properties.x.pattern"),
    (argument({"patternProperties": {"[": {}}}), ".properties.x.patternProperties"),
    (argument({"type": "any"}), ".properties.x.type"),
    (argument({"enum": "abc"}), ".properties.x.enum"),
    (argument({"minimum": "3"}), ".properties.x.minimum"),
    (argument({"exclusiveMinimum": 10**400}), ".properties.x.exclusiveMinimum"),
    (argument({"const": [10**400]}), ".properties.x.const"),
    (argument({"$ref": "#/$defs/y"}), ".properties.x.$ref"),
    (argument({"$ref": "#/properties/x"}), ".properties.x.$ref"),
    (argument(5), ".properties"),
    ({"type": "object", "required": "x"}, ".required"),
    ({"type": "string"}, ".type"),
    ({"$ref": "#"}, ".$ref"),
]
VALID = [
    {},
    {"type": "object", "properties": {}},
    argument({"$ref": "#"}),
    argument({"type": ["string", "null"], "minLength": 1, "description": None}),
    {**argument({"$ref": "#/$defs/y"}), "$defs": {"y": {"type": "integer"}}},
    {**argument({"type": "string", "format": "date"}), "required": ["y"]},
    {**argument({}), "$schema": "http://json-schema.org/draft-07/schema#"},
    {"type": "object", "anyOf": [argument({"type": "null"}), {"required": ["y"]}]},
]


@pytest.mark.parametrize(("schema", "place"), UNSUPPORTED)
def test_fault_09_what_cannot_be_enforced_is_refused_where_it_has_to_be(
    schema: Any, place: str
) -> None:
    assert refusal(schema, "required") == place
    assert refusal(schema, NAMED) == place
    assert refusal(schema, "auto", strict=True) == place


@pytest.mark.parametrize("schema", [schema for schema, _ in UNSUPPORTED])
def test_what_need_not_be_enforced_may_say_more_than_can_be(schema: Any) -> None:
    """Editors offer what tools other programs describe; most are never called."""
    assert refusal(schema, "auto") is None
    assert refusal(schema, None, strict=False) is None
    assert refusal(schema, {"type": "function", "function": {"name": "g"}}) is None


@pytest.mark.parametrize(("schema", "place"), INVALID)
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_fault_09_what_is_no_schema_is_refused_everywhere(
    schema: Any, place: str, choice: str
) -> None:
    assert refusal(schema, choice) == place


@pytest.mark.parametrize("schema", VALID)
def test_other_schemas_are_taken(schema: Any) -> None:
    assert refusal(schema, "required") is None
    assert refusal(schema, "auto", strict=True) is None


@pytest.mark.parametrize("pattern", [r"^\p{L}+(?!x)$", r"(?<year>\d{4})(?=-)", "[^](?!a)", r"\cA"])
def test_patterns_of_another_dialect_are_patterns(pattern: str) -> None:
    assert refusal(argument({"type": "string", "pattern": pattern})) is None
