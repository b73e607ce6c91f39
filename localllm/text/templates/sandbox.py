"""Jinja as transformers sets it up, for templates that come from files of unknown origin.

Three things are bounded: what a template can reach (no attribute but a few harmless ones, no
filter but those known), what it can make, and how long it runs. The last two need hooks wherever
Jinja loops, calls, joins or keeps a value; a pass over the parsed template puts them there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedFormatter,
    safe_range,
)
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from localllm.text.templates.filters import (
    INTERNAL_FILTERS,
    bounded_replace,
    concatenate,
    make_filters,
    to_text,
)
from localllm.text.templates.limits import budget, size_of

_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "count", "endswith", "find", "format", "format_map"),
            *("index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower"),
            *("isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip"),
            *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
            *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
            *("swapcase", "title", "upper"),
        )
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    tuple: frozenset(("count", "index")),
    list: frozenset(("append", "copy", "count", "index", "pop")),
}
_OPEN = (BlockReference, LoopContext, Macro, Namespace, TemplateReference)
_CHANGING = ("append", "pop")
_CALL_STEPS = 5  # a call takes longer than a round of a loop
_MAX_INTEGER_BITS = 4096
_MAX_WIDTH = 1000
_LONG_NUMBER = re.compile(r"\d{4,}")


class InputList(list[Any]):
    """A list that the caller owns: a template may change only those that it made itself."""


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`."""


class GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - as in the class it derives from

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders only while a budget is running (`limits.start_budget`)."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            # Nothing is computed while compiling, where there is no budget.
            optimized=False,
            finalize=_finalize,
        )
        self.filters = {**make_filters(), **INTERNAL_FILTERS}
        self.globals = {
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }

    def concat(self, parts: Iterable[str]) -> str:
        return concatenate(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        return _Hooks().visit(template)  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods and not (attr in _CHANGING and type(obj) is not list)
        return isinstance(obj, _OPEN) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        template: str = value.__self__
        formatter = _BoundedFormatter(self)

        def format_positional(*args: Any, **kwargs: Any) -> str:
            _bound_format(template, "{", [args, kwargs])
            return formatter.vformat(template, args, kwargs)

        def format_mapping(mapping: Mapping[str, Any]) -> str:
            return format_positional(**mapping)

        return format_positional if value.__name__ == "format" else format_mapping

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The names, as in the class above, stay clear of those that macros give their arguments.
        running = budget()
        running.step(_CALL_STEPS)
        size_of(args)
        size_of(kwargs)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            __obj, args = _bounded_method(owner, name, __obj, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list):
            running.make(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return _percent_format(left, right)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            budget().make(len(left) + len(right))
        elif operator == "*":
            _bound_product(left, right)
        elif operator == "**":
            _bound_power(left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        item = super().getitem(obj, argument)
        if isinstance(argument, slice) and isinstance(item, str | list | tuple):
            budget().make(len(item))
        return item


@pass_context
def _finalize(_context: Context, value: Any) -> str:
    # Wanting the context keeps Jinja from calling this while compiling.
    return to_text(value)


class _Hooks(NodeTransformer):
    """Puts the internal filters around loops, joins, dictionary keys and values that are kept."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's convention
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_steps")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        self.generic_visit(node)
        node.node = _filtered(node.node, "_checked")
        return node

    def visit_With(self, node: nodes.With) -> nodes.With:  # noqa: N802
        self.generic_visit(node)
        node.values = [_filtered(value, "_checked") for value in node.values]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = _filtered(node.key, "_key")
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        # Lists, unlike tuples, are never hashed.
        self.generic_visit(node)
        return nodes.List(node.items, lineno=node.lineno) if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if _LONG_NUMBER.search(format_spec):
            raise SecurityError(f"a width in {format_spec!r} is more than {_MAX_WIDTH}")
        if not format_spec:
            return to_text(value)
        return str(super().format_field(value, format_spec))


def _bound_format(template: str, mark: str, values: Any) -> None:
    fields = template.count(mark)
    budget().make(len(template) + fields * (_MAX_WIDTH + size_of(values)))


def _percent_format(template: str, values: Any) -> str:
    if isinstance(values, list):
        values = tuple(values)
    if "*" in template or _LONG_NUMBER.search(template):
        raise SecurityError(f"a width is given or is more than {_MAX_WIDTH}")
    _bound_format(template, "%", values)
    return str(template % values)


def _bounded_method(
    owner: str, name: str, method: Any, args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """The methods of text that can make more than they are given, or that want tuples."""
    if name == "replace" and len(args) >= 2:
        return bounded_replace, (owner, *args)
    if name == "join" and args:
        texts = list(args[0])
        budget().make(sum(map(len, texts)) + len(owner) * len(texts))
        return method, (texts,)
    if name in ("startswith", "endswith") and args and isinstance(args[0], list):
        return method, (tuple(args[0]), *args[1:])
    return method, args


def _bound_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
            raise SecurityError("a number is too large")
    elif isinstance(right, int):
        budget().make(size_of(left) * max(right, 0))
    elif isinstance(left, int):
        budget().make(size_of(right) * max(left, 0))


def _bound_power(left: Any, right: Any) -> None:
    integers = isinstance(left, int) and isinstance(right, int)
    if integers and left.bit_length() * abs(right) > _MAX_INTEGER_BITS:
        raise SecurityError("a number is too large")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusalError(to_text(message))


def _strftime_now(date_format: str) -> str:
    if len(date_format) > _MAX_WIDTH or _LONG_NUMBER.search(date_format):
        raise SecurityError("the format of a date is too long")
    return datetime.now().strftime(date_format)


def string_constants(template: nodes.Template) -> Iterator[str]:
    """What a template compares text with, cuts it at or joins it with."""
    for constant in template.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
