"""What is wrong with a grammar, found before any work is done for it.

Of a JSON schema: which keyword cannot be enforced, or contradicts another, and where it stands.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.text.grammars import (
    asks_for_nothing,
    check_length,
    compilable,
    compile_problem,
    json_grammar,
    parse_schema,
)
from localllm.text.schema_walk import (
    DEEPEST,
    Node,
    Schema,
    check_reference,
    children,
    is_local,
    refusal,
    subschemas,
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


def check_grammar(spec: GrammarSpec, where: str) -> None:
    """RequestError, naming `where` it was given or a place below, unless it can be enforced."""
    try:
        check_length(spec)
        if spec.kind == "json_schema":
            check_schema(parse_schema(spec.source), where)
            return
        problem = compile_problem(compilable(spec))
    except RequestError as error:
        if error.param == "grammar":
            message = str(error).removeprefix("grammar: ")
            raise RequestError(f"{where}: {message}", param=where, code=error.code) from error
        raise
    if problem and spec.kind == "gbnf":  # it speaks of lines of the Lark that this was made into
        reason = re.sub(r"^[\d:() ]+", "", problem.split(" 1 | ")[0])
        problem = f"the GBNF cannot be enforced: {reason}"
    if problem:
        raise RequestError(f"{where}: {problem}", param=where, code="invalid_grammar")


def check_schema(schema: Schema, where: str) -> None:
    """RequestError, whose `param` is the path of a keyword below `where`, unless every keyword of
    the schema can be enforced and something satisfies it."""
    nodes = subschemas(schema, where)
    for path, node in nodes:
        for keyword in node:
            if keyword in _NEVER_ENFORCED and not asks_for_nothing(keyword, node[keyword]):
                raise refusal(path, keyword, "this keyword is not supported")
        _check_reference(node, schema, path)
    problem = compile_problem(json_grammar(schema))
    if problem:
        raise _blame(schema, where, problem)
    _check_contradictions(schema, nodes)


def _check_contradictions(schema: Schema, nodes: list[Node]) -> None:
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


def _check_reference(node: dict[str, Any], root: Schema, path: str) -> None:
    reference = node.get("$ref")
    if reference is not None and not is_local(reference):
        raise refusal(path, "$ref", f"only references within the schema are, not {reference!r}")
    check_reference(node, root, path)


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
        return refusal(where, "", problem)
    is_whole = shared is None
    shared = _shared(schema) if shared is None else shared
    path, node = where, schema
    for _ in range(DEEPEST):
        for child_path, child in children(node, path):
            own = _problem_of(child, shared)
            if own:
                path, node, problem = child_path, child, own
                break
        else:
            break
    for keyword in sorted(node, key=lambda word: (word not in problem, word == "type")):
        rest = {k: v for k, v in node.items() if k != keyword}
        if not _problem_of(rest, {} if is_whole and node is schema else shared):
            return refusal(path, keyword, problem)
    return refusal(path, "", problem)


def _problem_of(schema: Any, shared: dict[str, Any]) -> str:
    if not isinstance(schema, dict):
        return ""
    problem = compile_problem(json_grammar({**shared, **schema}))
    # A reference to elsewhere in the whole schema: nothing is wrong with it, see _check_reference.
    return "" if problem.startswith("Pointer ") else problem
