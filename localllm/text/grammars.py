"""Grammars in the form that llguidance compiles, and what is wrong with those that it does not."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LONGEST_SOURCE = 500_000  # characters
_LONGEST_MESSAGE = 500
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")  # not schemas

# Fixed, whatever a schema's "x-guidance" says: what is generated has to be plain JSON, nothing may
# be dropped, and a run of white space has to end. Without \u a text has one spelling: a property
# cannot come a second time, under the rules of unknown ones, with an escape in its name.
JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


def compilable(spec: GrammarSpec) -> str:
    """What `llguidance.LLMatcher` takes; RequestError when the source cannot even be read."""
    from llguidance import LLMatcher

    check_length(spec)
    match spec.kind:
        case "json_object":
            return json_grammar({"type": "object"})
        case "json_schema":
            return json_grammar(parse_schema(spec.source))
        case "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice_lark(spec.source))
        case "lark":
            return LLMatcher.grammar_from_lark(spec.source)
        case "gbnf":
            return LLMatcher.grammar_from_lark(_gbnf_lark(spec.source))


def check_length(spec: GrammarSpec) -> None:
    if len(spec.source) > LONGEST_SOURCE:
        raise grammar_error(f"the {spec.kind} is longer than {LONGEST_SOURCE} characters")


def lark_rule(spec: GrammarSpec) -> str | None:
    """The body of a rule in Lark that means the same, for a grammar that has more in it; None for
    the kinds that have rules of their own."""
    match spec.kind:
        case "json_object" | "json_schema":
            schema = parse_schema(spec.source) if spec.kind == "json_schema" else {"type": "object"}
            if isinstance(schema, bool):
                schema = {} if schema else {"enum": []}
            return f"%json {json.dumps({**_enforced(schema), 'x-guidance': JSON_OPTIONS})}"
        case "regex":
            return "/" + re.sub(r"(?<!\\)/", r"\/", spec.source) + "/"
        case "choice":
            return _choice_lark(spec.source).removeprefix("start: ")
        case _:
            return None


def json_grammar(schema: dict[str, Any] | bool) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return LLMatcher.grammar_from_json_schema(
        json.dumps({k: v for k, v in _enforced(schema).items() if k != "x-guidance"}),
        overrides=JSON_OPTIONS,  # type: ignore[arg-type]
    )


def asks_for_nothing(keyword: str, value: object) -> bool:
    """Of keywords that cannot be enforced: with this value there is nothing to enforce."""
    return (keyword in ("uniqueItems", "not") and value is False) or (
        keyword == "minContains" and value == 0
    )


def _enforced(schema: Any) -> Any:
    """The schema without what asks for nothing but would be refused."""
    if isinstance(schema, list):
        return [_enforced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: _enforced(member) for name, member in value.items()}
        elif not asks_for_nothing(keyword, value):
            kept[keyword] = value if keyword in _VALUES else _enforced(value)
    return kept


def compile_problem(grammar: str) -> str:
    """Why llguidance does not take a grammar, in one line; "" if it does."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if not is_error:
        return ""
    return " ".join(messages[0].split())[:_LONGEST_MESSAGE] or "it cannot be compiled"


def parser_limits() -> LLParserLimits:
    """What a grammar may cost: thousands of alternatives, but no more than a second or two."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=500_000, max_items_in_row=20_000)


def regex_problem(pattern: str) -> str:
    """Why a schema's `pattern` is not taken, in one line; "" if it is."""
    return compile_problem(json_grammar({"type": "string", "pattern": pattern}))


def parse_schema(source: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise grammar_error(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise grammar_error("a schema must be an object")
    return schema


def grammar_error(message: str) -> RequestError:
    return RequestError(f"grammar: {message}", param="grammar", code="invalid_grammar")


def _choice_lark(source: str) -> str:
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise grammar_error(f"the choices are not a JSON list: {error}") from error
    is_list = isinstance(choices, list) and choices
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise grammar_error("choices must be a list of texts, not empty")
    # In one piece: a rule with thousands of alternatives is more than llguidance's parser takes.
    return f"start: /({'|'.join(map(literal_pattern, choices))})/"


def literal_pattern(text: str) -> str:
    """`text` within a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _gbnf_lark(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = str(gbnf_to_lark(_CODE_POINT.sub(_as_character, source)))
    except Exception as error:  # the converter raises many kinds
        raise grammar_error(f"the GBNF cannot be read: {' '.join(str(error).split())}") from error

    return _LARK_PIECE.sub(_with_parentheses, lark)


# `("a"*)+` comes out of the converter without its parentheses, which Lark does not take.
_LARK_PIECE = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\w+|\))((?:[*+?]|\{[\d,]*\}){2,}|)')
_QUANTIFIER = re.compile(r"[*+?]|\{[\d,]*\}")


def _with_parentheses(match: re.Match[str]) -> str:
    atom, quantifiers = match.groups()
    if atom == ")":  # they are somewhere before it
        kinds = set(quantifiers)
        return atom + (quantifiers if not kinds <= {*"*+?"} else _either(kinds))
    for quantifier in _QUANTIFIER.findall(quantifiers)[:-1]:
        atom = f"({atom}{quantifier})"
    return atom + "".join(_QUANTIFIER.findall(quantifiers)[-1:])


def _either(quantifiers: set[str]) -> str:
    return "*" if len(quantifiers) > 1 else "".join(quantifiers)


_CODE_POINT = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def _as_character(match: re.Match[str]) -> str:
    """Code points as themselves: the converter's own escapes for them are wrong."""
    backslashes, short, long = match.groups()
    code = int(short or long, 16)
    if code < 0x80:
        return f"{backslashes}\\x{code:02x}"
    try:
        return backslashes + chr(code).encode().decode()
    except ValueError as error:  # a surrogate, or beyond Unicode
        raise grammar_error(f"the GBNF has a code point that is none: {code:#x}") from error
