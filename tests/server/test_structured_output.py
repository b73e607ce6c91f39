"""Structured output over HTTP: every dialect becomes a grammar, or an error before any work."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from localllm.grammar import GrammarSpec
from tests.server.fakes import FakeEngine

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TEXT = json.dumps(SCHEMA)


async def ask(client: httpx.AsyncClient, path: str = "completions", **fields: Any) -> Any:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = {"prompt": "Hi"} if path == "completions" else chat
    return await client.post(f"/v1/{path}", json={**prompt, **fields})


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": schema_format(SCHEMA)}, "json_schema", TEXT),
        ({"response_format": schema_format(SCHEMA, strict=False)}, "json_schema", TEXT),
        ({"response_format": schema_format(None)}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "gbnf", 'root ::= "a"'),
    ],
)
async def test_every_dialect(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    fields: dict[str, Any],
    kind: Any,
    source: str,
) -> None:
    (await ask(client, path, **fields)).raise_for_status()
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None
    assert GrammarSpec(grammar.kind, grammar.source) == GrammarSpec(kind, source)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"grammar": ""},
        {"json_schema": {}},
        {"structured_outputs": {}},
    ],
)
async def test_what_asks_for_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    (await ask(client, "chat/completions", **fields)).raise_for_status()
    assert engine.submitted[-1].params.grammar is None


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            {"response_format": schema_format({"properties": {"x": {"not": {}}}})},
            "response_format.json_schema.schema.properties.x.not",
        ),
        (
            {
                "response_format": schema_format(
                    {"items": {"minItems": 2, "maxItems": 1, "type": "array"}}
                )
            },
            "response_format.json_schema.schema.items.minItems",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"if": {}}}},
            "response_format.schema.if",
        ),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.uniqueItems"),
        ({"guided_json": "{"}, "guided_json"),
        ({"json_schema": {"contains": {}}}, "json_schema.contains"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(?!a)b"}}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
async def test_fault_09_what_cannot_be_enforced_is_named_before_any_work(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], place: str
) -> None:
    for stream in (False, True):
        answer = await ask(client, path, stream=stream, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == place
        assert place.rsplit(".", 1)[-1] in error["message"]
    assert not engine.submitted
