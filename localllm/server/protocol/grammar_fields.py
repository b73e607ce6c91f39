"""The fields that ask for structured output, in the dialects of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.server.protocol.base import RequestBody, not_supported
from localllm.text.grammar_check import check_grammar

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, max_length=10_000)]
Wish = tuple[str, GrammarSpec]
"""Where in the request a grammar stands, for error messages, and the grammar."""


class JsonSchemaFormat(RequestBody):
    """`strict` makes no difference: a schema is enforced in any case."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """`schema` with `json_object` is llama.cpp's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(None, alias="schema")

    def wish(self) -> Wish | None:
        if self.type == "text":
            return None
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError(
                    "response_format.json_schema: this field is required",
                    param="response_format.json_schema",
                )
            where, schema = "response_format.json_schema.schema", self.json_schema.schema_
        else:
            where, schema = "response_format.schema", self.schema_
        if schema is None:
            return "response_format", GrammarSpec("json_object")
        return where, GrammarSpec("json_schema", json.dumps(schema))


class StructuredOutputs(RequestBody):
    """vLLM's."""

    json_: str | Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def wishes(self) -> Iterator[Wish]:
        for name in self.model_extra or {}:
            if (self.model_extra or {})[name] not in (None, False):
                raise not_supported(f"structured_outputs.{name}")
        where = "structured_outputs"
        if self.json_ is not None:
            yield f"{where}.json", _schema(self.json_)
        if self.json_object:
            yield f"{where}.json_object", GrammarSpec("json_object")
        if self.regex is not None:
            yield f"{where}.regex", GrammarSpec("regex", self.regex)
        if self.choice is not None:
            yield f"{where}.choice", _choice(self.choice)
        if self.grammar is not None:
            yield f"{where}.grammar", _grammar(self.grammar)


class GrammarFields(RequestBody):
    """At most one of them may ask for something. Grammars are GBNF where they have `::=`, else
    llguidance's Lark."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | Schema | None = None
    grammar: str | None = None

    def wanted_grammar(self) -> GrammarSpec | None:
        """What the output has to match; RequestError, naming the place, if it cannot be."""
        wishes = list(self._wishes())
        if not wishes:
            return None
        if len(wishes) > 1:
            names = " and ".join(where for where, _ in wishes)
            raise RequestError(f"{names} exclude each other", param=wishes[1][0])
        where, spec = wishes[0]
        _check_once(spec, where)
        return spec

    def _wishes(self) -> Iterator[Wish]:
        if self.response_format is not None and (wish := self.response_format.wish()):
            yield wish
        if self.structured_outputs is not None:
            yield from self.structured_outputs.wishes()
        if self.guided_json is not None:
            yield "guided_json", _schema(self.guided_json)
        if self.guided_regex is not None:
            yield "guided_regex", GrammarSpec("regex", self.guided_regex)
        if self.guided_choice is not None:
            yield "guided_choice", _choice(self.guided_choice)
        if self.guided_grammar is not None:
            yield "guided_grammar", _grammar(self.guided_grammar)
        if self.json_schema is not None and self.json_schema != {}:
            yield "json_schema", _schema(self.json_schema)
        if self.grammar:
            yield "grammar", _grammar(self.grammar)


@lru_cache(256)
def _check_once(spec: GrammarSpec, where: str) -> None:
    """The same schema comes with every request of a program."""
    check_grammar(spec, where)


def _schema(schema: str | Schema) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _choice(choices: list[str]) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(choices))


def _grammar(source: str) -> GrammarSpec:
    return GrammarSpec("gbnf" if "::=" in source else "lark", source)
