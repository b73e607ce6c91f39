"""What the tools of a request say about their arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from localllm.errors import RequestError
from localllm.text.grammar_check import check_schema
from localllm.text.schema_validity import check_valid
from localllm.text.schema_walk import is_local, refusal

_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_NAME = 256
_WHOLE = "whole"
_MORE = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"),
        *("allOf", "anyOf", "oneOf", "$ref"),
    }
)
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """`parameters` is a JSON schema of an object; `strict`: what of it cannot be enforced is
    refused; `where` it stands in the request, for errors."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    where: str = "tools"

    @classmethod
    def of(cls, definition: Mapping[str, Any], where: str) -> Self:
        """From OpenAI's form; RequestError naming `where` if it is not that."""
        function = definition.get("function")
        if definition.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError(f"{where}: only tools of type 'function' are known", param=where)
        name, parameters = function.get("name"), function.get("parameters") or _NOTHING
        if not isinstance(name, str) or not name or len(name) > _MAX_NAME or set(name) - _NAMES:
            raise RequestError(
                f"{where}.function.name must be letters, digits, _, - and dots, not {name!r}",
                param=where,
            )
        if not isinstance(parameters, Mapping):
            raise RequestError(f"{where}.function.parameters must be a schema", param=where)
        strict = function.get("strict", definition.get("strict")) is True
        return cls(name, parameters, strict, f"{where}.function.parameters")

    @property
    def properties(self) -> Mapping[str, Any]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def takes_anything(self) -> bool:
        """Whether the arguments may have any names."""
        said = self.parameters.keys() & {"properties", "additionalProperties"}
        return not said or self.parameters.get("additionalProperties") is True

    @property
    def required(self) -> frozenset[str]:
        required = self.parameters.get("required")
        names = required if isinstance(required, list) else ()
        return frozenset(name for name in names if isinstance(name, str))

    @property
    def closed(self) -> Self:
        """With no arguments but those that are listed, unless the schema speaks of others."""
        parameters = {**self.parameters, "type": "object"}
        listed = isinstance(parameters.get("properties"), Mapping)
        if listed and self.required <= self.properties.keys() and not _MORE & parameters.keys():
            parameters["additionalProperties"] = False
        return replace(self, parameters=parameters)

    def argument(self, key: str) -> Mapping[str, Any]:
        """The schema of one argument, by itself: the whole that it may refer to is within it."""
        schema = self.properties.get(key)
        if not isinstance(schema, Mapping):
            return {}
        if not _refers(schema):
            return schema
        return {**_rebased(schema), "$defs": {_WHOLE: _rebased(self.parameters)}}

    def is_text(self, key: str) -> bool:
        """Whether the argument is a string and nothing else."""
        return is_text(self.argument(key))


def _refers(schema: Any) -> bool:
    parts = schema.values() if isinstance(schema, Mapping) else schema
    if isinstance(schema, str) or not isinstance(parts, Iterable):
        return False
    return (isinstance(schema, Mapping) and "$ref" in schema) or any(map(_refers, parts))


def _rebased(schema: Any) -> Any:
    """With references to the whole schema as such to a definition."""
    if isinstance(schema, list):
        return [_rebased(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    rebased = {key: _rebased(value) for key, value in schema.items()}
    if is_local(schema.get("$ref")):
        rebased["$ref"] = f"#/$defs/{_WHOLE}{schema['$ref'][1:]}"
    return rebased


def is_text(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return bool(values) and all(isinstance(value, str) for value in values)


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value that is no other JSON may be a string."""
    kinds = schema.get("type")
    if kinds is None and {"enum", "const"} & schema.keys():
        return is_text(schema)
    if kinds is None and isinstance(options := schema.get("anyOf"), list):
        return any(isinstance(option, bool) or may_be_text(option) for option in options)
    if kinds is None:
        return True
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def texts_in(schema: Mapping[str, Any]) -> list[str]:
    """The texts that are allowed, where only some are."""
    options = schema.get("enum")
    if isinstance(options, list):
        return [option for option in options if isinstance(option, str)]
    return [schema["const"]] if isinstance(schema.get("const"), str) else []


def tools_of(definitions: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """RequestError for definitions that are not understood, or whose schema is none (see
    `check_valid`), and for two tools of one name."""
    tools = tuple(Tool.of(one, f"tools[{index}]") for index, one in enumerate(definitions))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools: there are two tools named {name!r}", param="tools")
    for tool in tools:
        _check_once(_as_source(tool), tool.where, enforced=False)
    return tools


def check_enforceable(tool: Tool) -> None:
    """RequestError, naming the place, unless a grammar can enforce all of the tool's schema."""
    _check_once(_as_source(tool.closed), tool.where, enforced=True)


def _as_source(tool: Tool) -> str:
    try:
        return json.dumps(tool.parameters)
    except RecursionError:
        raise refusal(tool.where, "", "it is nested too deeply") from None


@lru_cache(1024)
def _check_once(source: str, where: str, *, enforced: bool) -> None:
    """The same tools come with every request of a program."""
    schema = json.loads(source)
    kind = schema.get("type")
    if not enforced and kind not in (None, "object") and "object" not in kind:
        raise refusal(where, "type", "the arguments of a function are an object")
    (check_schema if enforced else check_valid)(schema, where)
