"""The subschemas of a JSON schema, each with its path, and errors that name such a place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeAlias

from localllm.errors import RequestError

Schema: TypeAlias = "dict[str, Any] | bool"
Node: TypeAlias = "tuple[str, dict[str, Any]]"

# Of every draft; what else stands in a schema is, by the specification, a note for people.
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "not", "if", "then", "else"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)
SCHEMA_MAPS = (
    *("properties", "patternProperties", "dependentSchemas", "dependencies"),
    *("$defs", "definitions"),
)
DEEPEST = 100
_MOST_NODES = 10_000
_LARGEST_FACTOR = 100_000
_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]*")


def subschemas(schema: Schema, where: str) -> list[Node]:
    """Every subschema that is an object, parents first; RequestError where they are too many, or
    have numbers that float64 cannot hold."""
    found = []
    for node in _below(schema, where, 0):
        found.append(node)
        if len(found) > _MOST_NODES:
            raise refusal(where, "", f"a schema may have {_MOST_NODES} subschemas")
        for keyword, value in node[1].items():
            if _is_too_large(value, keyword):
                raise refusal(node[0], keyword, "numbers must be finite and fit a float64")
        _check_multiple(*node)
    return found


def _below(schema: Any, path: str, depth: int) -> Iterator[Node]:
    if depth > DEEPEST:
        raise refusal(path, "", f"schemas nest at most {DEEPEST} deep")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for child_path, child in children(schema, path):
        yield from _below(child, child_path, depth + 1)


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in dict.fromkeys((*SCHEMAS, *SCHEMA_LISTS)):
        value = schema.get(keyword)
        if isinstance(value, dict) and keyword in SCHEMAS:
            yield f"{path}.{keyword}", value
        elif isinstance(value, list) and keyword in SCHEMA_LISTS:
            for index, item in enumerate(value):
                yield f"{path}.{keyword}[{index}]", item
    for keyword in SCHEMA_MAPS:
        if isinstance(members := schema.get(keyword), dict):
            for name, member in members.items():
                yield f"{path}.{keyword}{_member(name)}", member


def _member(name: str) -> str:
    return f".{name}" if _PLAIN_NAME.fullmatch(name) else f"[{name!r}]"


def _is_too_large(value: Any, keyword: str) -> bool:
    """Whether a number is; subschemas are looked at by themselves."""
    if isinstance(value, bool | str) or value is None:
        return False
    if isinstance(value, int | float):
        try:
            return not math.isfinite(float(value))
        except OverflowError:
            return True
    if keyword in SCHEMAS or keyword in SCHEMA_LISTS or keyword in SCHEMA_MAPS:
        return False
    parts = value.values() if isinstance(value, dict) else value
    return any(_is_too_large(part, "") for part in parts)


def _check_multiple(path: str, node: dict[str, Any]) -> None:
    """A grammar of multiples has about as many states as the number has ones."""
    factor = node.get("multipleOf")
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        digits = Decimal(str(factor)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > _LARGEST_FACTOR:
            raise refusal(path, "multipleOf", f"{factor} has too many digits to be enforced")


def check_reference(node: Any, root: Schema, path: str) -> None:
    """RequestError for a reference within the schema that leads nowhere, or back to itself."""
    seen: list[Any] = []
    while isinstance(node, dict) and is_local(node.get("$ref")):
        if any(node is other for other in seen):
            raise refusal(path, "$ref", "this reference leads back to itself")
        seen.append(node)
        reference = str(node["$ref"])
        node = _target(reference, root)
        if node is None:
            raise refusal(path, "$ref", f"{reference!r} does not exist")


def is_local(reference: object) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _target(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and part in target:
            target = target[part]
        elif isinstance(target, list) and part.isdigit() and int(part) < len(target):
            target = target[int(part)]
        else:
            return None
    return target


def refusal(path: str, keyword: str, problem: str) -> RequestError:
    at = f"{path}.{keyword}" if keyword else path
    return RequestError(f"{at}: {problem}", param=at, code="unsupported_schema")
