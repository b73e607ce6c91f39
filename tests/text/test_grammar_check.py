"""Schemas: what is refused, where, and that what is accepted is enforced."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammar_check import check_grammar, check_schema
from localllm.text.grammars import compilable, json_grammar

SUITE = os.environ.get("LOCALLLM_JSON_SCHEMA_SUITE")


def accepts(schema: Any, text: str) -> bool:
    """Whether the grammar of the schema lets `text` be the whole output, byte by byte."""
    return takes(json_grammar(schema), text)


def takes(grammar: str, text: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(schema: Any) -> str | None:
    """The place that is at fault."""
    caught: RequestError | None = None
    try:
        check_schema(schema, "s")
    except RequestError as error:
        caught = error
    if caught is None:
        return None
    assert caught.param is not None
    assert str(caught).startswith(f"{caught.param}: ")
    assert caught.code == "unsupported_schema"
    return caught.param


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        # what cannot be enforced
        ({"properties": {"x": {"not": {}}}}, "s.properties.x.not"),
        ({"items": [{}, {"uniqueItems": True}]}, "s.items[1].uniqueItems"),
        ({"$defs": {"a b": {"contains": {}}}}, "s.$defs['a b'].contains"),
        ({"anyOf": [{}, {"allOf": [{"if": {}}]}]}, "s.anyOf[1].allOf[0].if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "s.propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "s.dependentRequired"),
        ({"additionalProperties": {"unevaluatedItems": False}}, None),
        ({"properties": {"x": {"type": "string", "format": "coin"}}}, "s.properties.x.format"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "s.items.pattern"),
        (
            {"properties": {"q": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}},
            "s.properties.q.oneOf",
        ),
        # what nothing satisfies
        (
            {"properties": {"n": {"type": "number", "minimum": 5, "maximum": 1}}},
            "s.properties.n.minimum",
        ),
        ({"items": {"type": "string", "minLength": 3, "maxLength": 2}}, "s.items.minLength"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "s.allOf"),
        ({"properties": {"q": {"allOf": [{"type": "string"}, {"type": "null"}]}}}, None),
        ({"enum": []}, "s.enum"),
        (False, "s"),
        (
            {"type": "object", "required": ["a"], "additionalProperties": False},
            "s.required",
        ),
        # what is no schema
        ({"type": "strin"}, "s.type"),
        ({"properties": {"a": 5}}, "s.properties"),
        ({"required": "a"}, "s.required"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "s.properties.a.$ref"),
        ({"items": {"$ref": "http://example.com/x.json"}}, "s.items.$ref"),
        ({"items": {"$ref": "#anchor"}}, "s.items.$ref"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "s.properties.a.$ref"),
        # numbers that are too large
        ({"items": {"exclusiveMinimum": 10**400}}, "s.items.exclusiveMinimum"),
        ({"exclusiveMinimum": float("inf")}, "s.exclusiveMinimum"),
        ({"properties": {"a": {"const": {"b": [10**400]}}}}, "s.properties.a.const"),
        ({"type": "integer", "multipleOf": 1234577}, "s.multipleOf"),
    ],
)
def test_fault_09_an_unsupported_keyword_is_named_with_its_path(
    schema: Any, place: str | None
) -> None:
    found = refusal(schema)
    assert found is not None
    if place is not None:
        assert found == place


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "array", "uniqueItems": False},
        {"properties": {"not": {"type": "string"}, "if": {}, "uniqueItems": True}},
        {"const": {"not": 1, "contains": 2}},
        {"enum": [{"if": 1}]},
        {"title": "T", "description": "d", "default": 1, "examples": [{"not": 1}], "x-any": 1},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "type": "null"},
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
        {"type": ["string", "null"], "maxLength": 3},
        {"properties": {"q": {"oneOf": [{"type": "string"}, {"type": "null"}]}}},
    ],
)
def test_what_can_be_enforced_is_accepted(schema: Any) -> None:
    assert refusal(schema) is None


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "multipleOf": 3}, ["0", "-9", "12"], ["4", "1.5", "3.0e0", '"3"']),
        ({"exclusiveMinimum": 3, "type": "number"}, ["3.5", "4"], ["3", "2.9"]),
        ({"exclusiveMinimum": True, "minimum": 3, "type": "integer"}, ["4"], ["3"]),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            ['"ab"', '"日本語"'],
            ['"a"', '"abcd"'],
        ),
        ({"type": "string", "pattern": "b+"}, ['"abbc"'], ['"ac"']),
        ({"format": "date", "type": "string"}, ['"2024-02-29"'], ['"2024-2-9"', '"x"']),
        ({"type": "object", "properties": {"not": False}}, ["{}", '{"a":1}'], ['{"not":1}']),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            ['{"a":1}', '{ "b" : "x" }'],
            ['{"a":"x"}', '{"a":1,"a":2}', '{"\\u0061":"x"}', '{"a":1,}'],
        ),
        (
            {"items": [{"type": "null"}], "additionalItems": False},
            ["[null]", "[]"],
            ["[1]", "[null,1]"],
        ),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1,2,2]"], ["[2]", "[1,1]"]),
        ({"type": "array", "minItems": 1, "maxItems": 2}, ["[0]"], ["[]", "[1,2,3]"]),
        ({"enum": ["a", 1, None, {"x": [True]}]}, ['"a"', "null", '{"x":[true]}'], ['"b"', "2"]),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        (
            {"type": "object", "patternProperties": {"^n": {"type": "null"}}},
            ['{"n1":null}'],
            ['{"n1":1}'],
        ),
        (
            {"type": "object", "x-guidance": {"item_separator": ";"}},
            ['{"a":1,"b":2}'],
            ['{"a":1;"b":2}'],
        ),
        ({"not": False, "type": "null"}, ["null"], ["1"]),
    ],
)
def test_enforced(schema: Any, valid: list[str], invalid: list[str]) -> None:
    assert refusal(schema) is None
    for text in valid:
        assert accepts(schema, text), text
    for text in invalid:
        assert not accepts(schema, text), text


def test_runs_of_white_space_end() -> None:
    assert accepts({"type": "object"}, "{" + " " * 20 + "}")
    assert not accepts({"type": "object"}, "{" + " " * 21 + "}")
    assert not accepts({"type": "object"}, " {}")
    assert not accepts({"type": "object"}, "{}\n")


def values(letters: str) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(letters, max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
        ),
        max_leaves=6,
    )


ASCII = 'ab 0"\\{'
LETTERS = ASCII + "é日😀"


def schemas(letters: str) -> st.SearchStrategy[dict[str, Any]]:
    """Of every keyword that is enforced, within reason."""
    leaf = st.one_of(
        st.sampled_from([{"type": t} for t in ("null", "boolean", "string", "integer", "number")]),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-50, 50),
            st.integers(0, 50),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        st.builds(lambda v: {"enum": v}, st.lists(values(letters), min_size=1, max_size=3)),
        st.builds(lambda v: {"const": v}, values(letters)),
    )

    def extend(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        properties = st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        return st.one_of(
            st.builds(
                lambda p, closed: {
                    "type": "object",
                    "properties": p,
                    "required": sorted(p)[::2],
                    **({"additionalProperties": False} if closed else {}),
                },
                properties,
                st.booleans(),
            ),
            st.builds(
                lambda i, low, more: {
                    "type": "array",
                    "items": i,
                    "minItems": low,
                    "maxItems": low + more,
                },
                inner,
                st.integers(0, 1),
                st.integers(0, 2),
            ),
            st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=2)),
        )

    return st.recursive(leaf, extend, max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(schema=schemas(LETTERS), value=values(LETTERS))
def test_no_value_passes_that_the_schema_forbids(schema: dict[str, Any], value: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    assert refusal(schema) is None
    if accepts(schema, json.dumps(value, ensure_ascii=False)):
        assert validator.is_valid(value)


def test_the_json_schema_test_suite() -> None:
    """Its folder of cases, or that of one draft, as the npm package json-schema-test-suite has."""
    if SUITE is None:
        pytest.skip("LOCALLLM_JSON_SCHEMA_SUITE does not name the suite's folder of tests")
    checked = refused = 0
    for path in sorted(Path(SUITE).rglob("*.json")):
        for group in json.loads(path.read_text()):
            if refusal(group["schema"]) is not None:
                refused += 1
                continue
            for case in group["tests"]:
                checked += 1
                passes = accepts(group["schema"], json.dumps(case["data"], ensure_ascii=False))
                assert case["valid"] or not passes, (path.name, group, case)
    assert checked > 2 * refused


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("regex", "(a"), "unclosed group"),
        (GrammarSpec("regex", "(?<=a)b"), "look-around"),
        (GrammarSpec("choice", "[]"), "not empty"),
        (GrammarSpec("choice", '["a", ""]'), "not empty"),
        (GrammarSpec("choice", "nonsense"), "not a JSON list"),
        (GrammarSpec("lark", "start: other"), "unknown name"),
        (GrammarSpec("gbnf", "root = 3"), "GBNF"),
        (GrammarSpec("gbnf", 'root ::= "\\uD800"'), "code point"),
        (GrammarSpec("json_schema", "{"), "not valid JSON"),
        (GrammarSpec("json_schema", "3"), "must be an object"),
        (GrammarSpec("json_schema", "[" * 5000), "not valid JSON"),
        (GrammarSpec("regex", "a" * 600_000), "longer than"),
        (GrammarSpec("json_schema", json.dumps({"enum": ["a" * 600_000]})), "longer than"),
        (GrammarSpec("gbnf", 'root ::= (("a" "b"){2})+'), "GBNF cannot be enforced"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(spec: GrammarSpec, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_grammar(spec, "guided")
    assert caught.value.param == "guided"
    assert str(caught.value).startswith("guided: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("gbnf", "lark"),
    [
        ('root ::= ("a"*)*', 'start: ("a"*)*'),
        ('root ::= (("a"?)+){2} "b**"', 'start: (("a"?)+){2,2} "b**"'),
        ('root ::= (("a" "b")*)+', 'start: ("a" "b")*'),
        ("root ::= ([/]{2,3})+", r"start: (/[\/]/{2,3})+"),
    ],
)
def test_repetitions_of_repetitions_in_gbnf(gbnf: str, lark: str) -> None:
    spec = GrammarSpec("gbnf", gbnf)
    check_grammar(spec, "grammar")
    assert lark in compilable(spec)


def test_deep_and_wide_schemas_are_refused_not_run() -> None:
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"items": deep}
    assert refusal(deep) is not None
    wide: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(11_000)}}
    assert refusal(wide) == "s"


@given(st.lists(st.text(st.sampled_from([*string.printable, "é"]), min_size=1), min_size=1))
def test_choices_are_what_they_say(choices: list[str]) -> None:
    grammar = compilable(GrammarSpec("choice", json.dumps(choices)))
    for choice in choices:
        assert takes(grammar, choice)
        assert takes(grammar, choice + "x") == (choice + "x" in choices)
