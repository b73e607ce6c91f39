"""What is no JSON schema, or one that nothing can satisfy, whatever a grammar can enforce of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from localllm.text.grammars import regex_problem
from localllm.text.schema_walk import (
    SCHEMA_MAPS,
    SCHEMAS,
    Schema,
    check_reference,
    refusal,
    subschemas,
)

_Test: TypeAlias = Callable[[Any], bool]

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_BOUNDS = tuple((f"min{of}", f"max{of}") for of in ("Length", "Items", "Properties", "Contains"))


def check_valid(schema: Schema, where: str) -> None:
    """RequestError, whose `param` is the path of a keyword below `where`: a value of the wrong
    type, bounds that exclude each other, a pattern that is no regular expression, a reference to
    nothing. Keywords that are null count as absent, as some clients write them."""
    for path, node in subschemas(schema, where):
        for keyword, (expected, test) in _KEYWORDS.items():
            value = node.get(keyword)
            if value is not None and not test(value):
                raise refusal(path, keyword, f"must be {expected}")
        check_reference(node, schema, path)
        _check_patterns(node, path)
        _check_bounds(node, path)


def _check_patterns(node: Mapping[str, Any], path: str) -> None:
    if (pattern := node.get("pattern")) is not None and (problem := _pattern_problem(pattern)):
        raise refusal(path, "pattern", problem)
    for pattern in node.get("patternProperties") or ():
        if problem := _pattern_problem(pattern):
            raise refusal(path, "patternProperties", problem)


def _pattern_problem(pattern: str) -> str:
    """Why it is no regular expression in any dialect: what Rust's lacks, others may have."""
    problem = regex_problem(pattern)
    if not problem:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(_python_regex(pattern))
        except (re.error, OverflowError, RecursionError):
            return problem
    return ""


def _python_regex(pattern: str) -> str:
    """What ECMAScript has and Python has not, by something that is as well-formed."""
    pattern = pattern.replace("[^]", ".")
    pattern = re.sub(r"\\[pPu]\{[^{}]*\}|\\c[A-Za-z]|\\k<\w+>", r"\\w", pattern)
    return pattern.replace("(?<", "(?P<").replace("(?P<=", "(?<=").replace("(?P<!", "(?<!")


def _check_bounds(node: Mapping[str, Any], path: str) -> None:
    for least, most in _BOUNDS:
        low, high = node.get(least), node.get(most)
        if low is not None and high is not None and low > high:
            raise refusal(path, least, f"{low} is greater than {most}, {high}")
    for least in ("minimum", "exclusiveMinimum"):
        for most in ("maximum", "exclusiveMaximum"):
            low, high = node.get(least), node.get(most)
            if _leave_nothing(low, high, is_open="exclusive" in least + most):
                raise refusal(path, least, f"{low} leaves nothing below {most}, {high}")


def _leave_nothing(low: Any, high: Any, *, is_open: bool) -> bool:
    if not (_is_number(low) and _is_number(high)):
        return False
    return bool(low > high or (is_open and low == high))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


_KEYWORDS: dict[str, tuple[str, _Test]] = {
    name: (expected, test)
    for names, expected, test in (
        ("type", f"one of {', '.join(_TYPES)}, or a list of them", _is_type),
        ("enum", "a list, not empty", lambda value: isinstance(value, list) and bool(value)),
        ("required", "a list of names", _are_texts),
        ("$ref pattern", "a text", lambda value: isinstance(value, str)),
        ("uniqueItems", "true or false", lambda value: isinstance(value, bool)),
        ("minimum maximum", "a number", _is_number),
        (
            "exclusiveMinimum exclusiveMaximum",
            "a number",
            lambda value: _is_number(value) or isinstance(value, bool),
        ),
        ("multipleOf", "a number above 0", lambda value: _is_number(value) and value > 0),
        (" ".join(sum(_BOUNDS, ())), "a whole number from 0", _is_count),
        (
            "items",
            "a schema",
            lambda value: _is_schema(value) or value == [] or _are_schemas(value),
        ),
        ("allOf anyOf oneOf prefixItems", "a list of schemas, not empty", _are_schemas),
        (" ".join(set(SCHEMAS) - {"items"}), "a schema", _is_schema),
        (
            " ".join(set(SCHEMA_MAPS) - {"dependencies"}),
            "an object of schemas",
            _are_named_schemas,
        ),
    )
    for name in names.split()
}
