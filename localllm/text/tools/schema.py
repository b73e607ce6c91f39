"""What the tools of a request say about their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from localllm.errors import RequestError

_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_NAME = 256
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """`parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

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
        return cls(name, parameters)

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

    def argument(self, key: str) -> Mapping[str, Any]:
        """The schema of one argument, with the definitions that it may refer to."""
        schema = self.properties.get(key)
        if not isinstance(schema, Mapping):
            return {}
        shared = {name: self.parameters[name] for name in ("$defs", "definitions")
                  if name in self.parameters}  # fmt: skip
        return {**schema, **shared}

    def is_text(self, key: str) -> bool:
        """Whether the argument is a string and nothing else."""
        return is_text(self.argument(key))


def is_text(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return bool(values) and all(isinstance(value, str) for value in values)


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value that is no other JSON may be a string."""
    kinds = schema.get("type")
    if kinds is None:
        return "enum" not in schema or is_text(schema)
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def texts_in(schema: Mapping[str, Any]) -> list[str]:
    """The texts that are allowed, where only some are."""
    options = schema.get("enum")
    if isinstance(options, list):
        return [option for option in options if isinstance(option, str)]
    return [schema["const"]] if isinstance(schema.get("const"), str) else []


def tools_of(definitions: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """RequestError for definitions that are not understood and for two tools of one name."""
    tools = tuple(Tool.of(one, f"tools[{index}]") for index, one in enumerate(definitions))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools: there are two tools named {name!r}", param="tools")
    return tools
