"""What is wrong with a grammar, found before any work is done for it.

Of a JSON schema: which keyword cannot be enforced, or contradicts another, and where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammars import (
    asks_for_nothing,
    compilable,
    compile_problem,
    json_grammar,
    parse_schema,
)

Schema: TypeAlias = "dict[str, Any] | bool"

# Of every draft; what else stands in a schema is, by the specification, a note for people.
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "not", "if", "then", "else"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)
_MAPS = (
    *("properties", "patternProperties", "dependentSchemas", "dependencies"),
    *("$defs", "definitions"),
)
_NEVER_ENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)
# Two of these may contradict each other.
_CONSTRAINTS = frozenset(
    {
        *("type", "const", "enum", "minimum", "maximum", "multipleOf"),
        *("exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "required"),
        *("additionalProperties",),
    }
)
_MOST_SUSPECTS = 500
_DEEPEST = 100
_MOST_NODES = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]*")


def check_grammar(spec: GrammarSpec, where: str) -> None:
    """RequestError, naming `where` it was given or a place below, unless it can be enforced."""
    try:
        if spec.kind == "json_schema":
            check_schema(parse_schema(spec.source), where)
            return
        problem = compile_problem(compilable(spec))
    except RequestError as error:
        if error.param == "grammar":
            message = str(error).removeprefix("grammar: ")
            raise RequestError(f"{where}: {message}", param=where, code=error.code) from error
        raise
    if problem:
        raise RequestError(f"{where}: {problem}", param=where, code="invalid_grammar")


def check_schema(schema: Schema, where: str) -> None:
    """RequestError, whose `param` is the path of a keyword below `where`, unless every keyword of
    the schema can be enforced and something satisfies it."""
    nodes = list(islice(_nodes(schema, where, 0), _MOST_NODES + 1))
    if len(nodes) > _MOST_NODES:
        raise _refusal(where, "", f"a schema may have {_MOST_NODES} subschemas")
    for path, node in nodes:
        for keyword in node:
            if keyword in _NEVER_ENFORCED and not asks_for_nothing(keyword, node[keyword]):
                raise _refusal(path, keyword, "this keyword is not supported")
        _check_reference(node, schema, path)
    problem = compile_problem(json_grammar(schema))
    if problem:
        raise _blame(schema, where, problem)
    _check_contradictions(schema, nodes)


def _check_contradictions(schema: Schema, nodes: list[tuple[str, dict[str, Any]]]) -> None:
    """What nothing satisfies, but need not be there: the compiler just never generates it."""
    shared = _shared(schema)
    suspects = (
        (path, node)
        for path, node in nodes
        if "allOf" in node or len(_CONSTRAINTS.intersection(node)) > 1
    )
    for path, node in islice(suspects, _MOST_SUSPECTS):
        if problem := _problem_of(node, shared):
            raise _blame(node, path, problem, shared)


def _nodes(schema: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its path; parents first."""
    if depth > _DEEPEST:
        raise _refusal(path, "", f"schemas nest at most {_DEEPEST} deep")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for child_path, child in _children(schema, path):
        yield from _nodes(child, child_path, depth + 1)


def _children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in dict.fromkeys((*_SINGLES, *_LISTS)):
        value = schema.get(keyword)
        if isinstance(value, dict) and keyword in _SINGLES:
            yield f"{path}.{keyword}", value
        elif isinstance(value, list) and keyword in _LISTS:
            for index, item in enumerate(value):
                yield f"{path}.{keyword}[{index}]", item
    for keyword in _MAPS:
        if isinstance(members := schema.get(keyword), dict):
            for name, member in members.items():
                yield f"{path}.{keyword}{_member(name)}", member


def _member(name: str) -> str:
    return f".{name}" if _PLAIN_NAME.fullmatch(name) else f"[{name!r}]"


def _check_reference(node: dict[str, Any], root: Schema, path: str) -> None:
    reference = node.get("$ref")
    if reference is None:
        return
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refusal(path, "$ref", f"only references within the schema are, not {reference!r}")
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and part in target:
            target = target[part]
        elif isinstance(target, list) and part.isdigit() and int(part) < len(target):
            target = target[int(part)]
        else:
            raise _refusal(path, "$ref", f"{reference!r} does not exist")


def _shared(schema: Schema) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    return {k: schema[k] for k in ("$defs", "definitions") if k in schema}


def _blame(
    schema: Schema, where: str, problem: str, shared: dict[str, Any] | None = None
) -> RequestError:
    """The deepest subschema that fails by itself, and the keyword without which it would not.

    `shared` are the definitions of the whole that `schema` is a part of; None if it is the whole.
    """
    if not isinstance(schema, dict):
        return _refusal(where, "", problem)
    is_whole = shared is None
    shared = _shared(schema) if shared is None else shared
    path, node = where, schema
    for _ in range(_DEEPEST):
        for child_path, child in _children(node, path):
            own = _problem_of(child, shared)
            if own:
                path, node, problem = child_path, child, own
                break
        else:
            break
    for keyword in sorted(node, key=lambda word: (word not in problem, word == "type")):
        rest = {k: v for k, v in node.items() if k != keyword}
        if not _problem_of(rest, {} if is_whole and node is schema else shared):
            return _refusal(path, keyword, problem)
    return _refusal(path, "", problem)


def _problem_of(schema: Any, shared: dict[str, Any]) -> str:
    if not isinstance(schema, dict):
        return ""
    problem = compile_problem(json_grammar({**shared, **schema}))
    # A reference to elsewhere in the whole schema: nothing is wrong with it, see _check_reference.
    return "" if problem.startswith("Pointer ") else problem


def _refusal(path: str, keyword: str, problem: str) -> RequestError:
    at = f"{path}.{keyword}" if keyword else path
    return RequestError(f"{at}: {problem}", param=at, code="unsupported_schema")
