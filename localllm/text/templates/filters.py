"""The filters that chat templates may use.

Jinja's own where they cannot make more than they are given, else ours, which know the limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import markupsafe
from jinja2 import Undefined, filters
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.utils import pass_environment

from localllm.text.templates.limits import budget, checked, size_of
from localllm.text.templates.mask import STAND_INS

_FROM_JINJA = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby"),
    *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "select", "selectattr", "sort", "title", "trim", "unique"),
    *("upper", "wordcount"),
)
_MAX_INDENT = 64
_MAX_DECIMALS = 20
_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{STAND_INS}]")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: plain JSON, without the escapes for HTML of Jinja's own."""
    _check_number(indent, _MAX_INDENT)
    budget().make(size_of(value) * (1 + (indent or 0)))
    text = json.dumps(
        value,
        default=_listed,
        ensure_ascii=False,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _listed(value: Any) -> list[Any]:
    """What `map`, `select` and the like yield."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _escaped(character: re.Match[str]) -> str:
    return json.dumps(character.group())[1:-1]


def from_json(text: str) -> Any:
    return json.loads(text)


def to_text(value: Any) -> str:
    """`str(value)`, for values that are no strings after looking how long that gets."""
    if not isinstance(value, str):
        budget().make(size_of(value))
    return str(value)


def concatenate(values: Iterable[Any]) -> str:
    texts = [to_text(value) for value in values]
    budget().make(sum(map(len, texts)))
    return "".join(texts)


@pass_environment
def join(
    environment: Environment, values: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    if attribute is not None:
        values = map(filters.make_attrgetter(environment, attribute), values)
    texts = [to_text(value) for value in values]
    separator = to_text(d)
    budget().make(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    return bounded_replace(to_text(text), old, new, -1 if count is None else count)


def bounded_replace(text: str, old: str, new: str, count: int = -1, /) -> str:
    found = text.count(old) if count < 0 else min(count, text.count(old))
    budget().make(len(text) + found * len(new))
    return text.replace(old, new, count)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_number(width, _MAX_INDENT)
    margin = len(width) if isinstance(width, str) else width
    budget().make(len(text) + (1 + text.count("\n")) * margin)
    return filters.do_indent(text, width, first, blank)


def round_number(value: float, precision: int = 0, method: str = "common") -> float:
    _check_number(precision, _MAX_DECIMALS)
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]


def sum_numbers(values: Iterable[float], start: float = 0) -> float:
    total = start
    for value in values:
        if not isinstance(value, int | float):
            raise SecurityError("sum adds numbers only")
        total += value
    return total


def steps(values: Iterable[Any]) -> Iterator[Any]:
    """What loops go over: each round is a step."""
    count = budget().step
    for value in values:
        count()
        yield value


def key(value: Any) -> Any:
    """What dictionaries may be made with: hashing nested tuples can take for ever."""
    if not isinstance(value, str | int | float | None | Undefined):
        raise SecurityError("a key of a dictionary is neither text nor a number")
    return value


def _check_number(value: Any, largest: int) -> None:
    if isinstance(value, int) and abs(value) > largest:
        raise SecurityError(f"{value} is more than {largest}")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's whose results are no longer than what it is given."""

    @wraps(function)  # with the mark that says which first argument it wants
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget().step()
        result = function(*args, **kwargs)
        if isinstance(result, str | list):
            budget().make(len(result))
        return result

    return counted


def escape(value: Any) -> str:
    """As text: nothing else is escaped, so nothing needs to remember that this is."""
    text = to_text(value)
    budget().make(6 * len(text))
    return str(markupsafe.escape(text))


def make_filters() -> Mapping[str, Callable[..., Any]]:
    ours: dict[str, Callable[..., Any]] = {
        "e": escape,
        "escape": escape,
        "from_json": from_json,
        "fromjson": from_json,
        "indent": indent,
        "join": join,
        "replace": replace,
        "round": round_number,
        "safe": to_text,  # nothing is ever escaped
        "string": to_text,
        "sum": sum_numbers,
        "tojson": tojson,
    }
    return {name: _counted(filters.FILTERS[name]) for name in _FROM_JINJA} | ours


INTERNAL_FILTERS: Mapping[str, Callable[..., Any]] = {
    "_checked": checked,
    "_concatenate": concatenate,
    "_key": key,
    "_steps": steps,
}
