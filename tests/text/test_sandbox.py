"""What a chat template from a file of unknown origin cannot do."""

from __future__ import annotations

from contextlib import suppress

import pytest

from localllm.errors import ChatTemplateError, TemplateRenderError
from localllm.text.chat_template import ChatTemplate
from tests.text.vocabularies import tokenizer

MESSAGES = [{"role": "user", "content": "Q"}]


def render(source: str) -> str:
    template = ChatTemplate({"default": source}, tokenizer("phi-3"))
    return template.render(MESSAGES)


# Where an attribute is not given, Jinja has an undefined value, which prints as nothing.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ messages|map(attribute='__class__')|first }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__init__}'.format(messages) }}",
    "{{ '{x.__class__.__init__}'.format_map({'x': ''}) }}",
    "{{ ('{0.__class__.__init__}'|string).format('') }}",
    "{% set f = '{0.__class__.__init__}'.format %}{{ f('') }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{{ range.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}{{ m._environment }}",
    "{% for x in [1] %}{{ loop.__class__ }}{{ loop._iterable }}{% endfor %}",
    "{{ (1).to_bytes(4, 'big') }}",
    "{{ ''.encode() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.name }}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_reaches_nothing_of_python(source: str) -> None:
    with suppress(ChatTemplateError, TemplateRenderError):
        assert render(source).strip() in ("", "[]")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ messages.pop() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].setdefault('x', 1) }}",
    ],
)
def test_changes_nothing_that_it_is_given(source: str) -> None:
    with pytest.raises(TemplateRenderError, match="unsafe"):
        render(source)
    assert MESSAGES == [{"role": "user", "content": "Q"}]


def test_may_change_lists_of_its_own() -> None:
    source = "{% set own = [] %}{% set _ = own.append('a') %}{{ own.pop() }}{{ own|length }}"
    assert render(source) == "a0"


DOUBLING = [
    "ns.s ~ ns.s",
    "ns.s + ns.s",
    "ns.s * 2",
    "[ns.s, ns.s]|join",
    "''.join([ns.s, ns.s])",
    "ns.s|replace('a', 'aa')",
    "ns.s.replace('a', 'aa')",
    "'%s%s' % (ns.s, ns.s)",
    "'{}{}'.format(ns.s, ns.s)",
    "'{x}{x}'.format_map({'x': ns.s})",
    "[ns.s, ns.s]",
    "[ns.s, ns.s]|tojson",
    "[ns.s, ns.s]|string",
    "{'x': ns.s, 'y': ns.s}",
    "(ns.s, ns.s)",
]


@pytest.mark.parametrize("expression", DOUBLING)
def test_cannot_make_values_that_double(expression: str) -> None:
    source = (
        "{% set ns = namespace(s='aaaaaaaa') %}"
        f"{{% for i in range(64) %}}{{% set ns.s = {expression} %}}{{% endfor %}}"
    )
    with pytest.raises(TemplateRenderError, match=r"characters|steps"):
        render(source)


ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% set l = [1] %}{% for i in range(60) %}{% set _ = l.append(l) %}{% endfor %}{{ l }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s=1) %}{% for i in range(60) %}"
    "{% set ns.s = ({ns.s: ns.s}.items()|list)[0] %}{% endfor %}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", ENDLESS)
def test_comes_to_an_end(source: str) -> None:
    with pytest.raises(TemplateRenderError):
        render(source)


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10**10",
        "[0] * 10**10",
        "10**10 * 'a'",
        "9**(9**9)",
        "range(10**9)",
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "'{:>1000000000}'.format(1)",
        "'{:>{width}}'.format(1, width=10**9)",
        "'a'.ljust(10**10)",
        "'a'.zfill(10**10)",
        "'a'|indent(10**9)",
        "messages|tojson(indent=10**9)",
        "1.5|round(10**9, 'ceil')",
        "([('a' * 1000000)] * 1000)|join",
        "(range(100000)|list) * 1000",
        "strftime_now('%1000000000d')",
    ],
)
def test_makes_nothing_large_in_one_step(expression: str) -> None:
    with pytest.raises(TemplateRenderError):
        render(f"{{{{ {expression} }}}}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'a }}",
        "{% if x %}",
        "{{ x|no_such_filter }}",
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{% if x %}" * 3000,
        "x" * 1_000_001,
    ],
    ids=lambda source: source[:20],
)
def test_what_cannot_be_parsed_is_an_error_of_the_file(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="default"):
        render(source)


def test_a_failure_is_the_requests_and_one_line() -> None:
    with pytest.raises(TemplateRenderError) as caught:
        render("{{ messages[0].content + 1 }}")
    assert str(caught.value).startswith("The chat template failed: TypeError")
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages"


class TestWhatTemplatesExpect:
    def test_tojson(self) -> None:
        value = "{'b': '<\u00e9>', 'a': [1, true, none]}"
        assert render(f"{{{{ {value}|tojson }}}}") == '{"b": "<\u00e9>", "a": [1, true, null]}'
        assert render(f"{{{{ {value}|tojson(sort_keys=true, separators=(',', ':')) }}}}") == (
            '{"a":[1,true,null],"b":"<\u00e9>"}'
        )
        assert render("{{ ['\u00e9\U0001f999']|tojson(ensure_ascii=true) }}") == (
            '["\\u00e9\\ud83e\\udd99"]'
        )
        assert render("{{ {'a': 1}|tojson(indent=2) }}") == '{\n  "a": 1\n}'
        assert render("{{ messages|map(attribute='role')|tojson }}") == '["user"]'

    def test_blocks_are_trimmed(self) -> None:
        assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"

    def test_loop_controls_and_generation_blocks(self) -> None:
        source = (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}"
            "{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
        )
        assert render(source) == "02"

    def test_loop_variables(self) -> None:
        source = (
            "{% for x in 'abc' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}"
            "{{ loop.previtem|default('-') }} {% endfor %}"
        )
        assert render(source) == "1False3- 2False3a 3True3b "

    def test_dates(self) -> None:
        assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10

    def test_text(self) -> None:
        source = (
            "{{ 'a b'.split()|join('-') }} {{ '%s %02d' % ('x', 3) }} {{ '{:.1f}'.format(2.55) }} "
            "{{ 'ab'.startswith(('b', 'a')) }} {{ 'a\nb'|indent(2) }} {{ 'x'|safe ~ '<' }} "
            "{{ 'aab'.replace('a', 'c', 1) }} {{ '<'|e }} {{ '{\"a\": 1}'|from_json }}"
        )
        assert render(source) == "a-b x 03 2.5 True a\n  b x< cab &lt; {'a': 1}"

    def test_unpacking_and_dictionaries(self) -> None:
        source = (
            "{% set a, b = 1, 2 %}{% for k, v in {'x': a, 'y': b}.items() %}{{ k }}{{ v }}"
            "{% endfor %}{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{% endfor %}"
        )
        assert render(source) == "x1y2ab"


KNOWN_ESCAPES = {
    "CVE-2016-10745": "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
    "CVE-2019-10906": "{{ '{x.__class__.__mro__[1].__subclasses__}'.format_map({'x': ''}) }}",
    "CVE-2024-56201": "{% include \"{{ ''.__class__ }}\" %}",
    "CVE-2024-56326": "{% set f = ''|attr('format') %}{{ [f]|map('call', '{0.__class__}')|list }}",
    "CVE-2024-56326, filter": "{{ ['{0.__class__}']|map('format', '')|list|first }}",
    "CVE-2025-27516": "{{ ('{0.__class__.__base__}'|attr('format'))('') }}",
    "CVE-2025-27516, map": "{{ ['{0.__class__}']|map(attribute='format')|map('string')|first }}",
    "through a macro": "{% macro m() %}{{ caller() }}{% endmacro %}{{ m.__globals__ }}",
    "through a frame": "{{ raise_exception.__code__.co_consts }}",
    "through a generator": "{{ (messages|map('upper')).gi_frame.f_back.f_globals }}",
    "through a coroutine": "{{ (messages|map('upper')).ag_frame }}{{ messages.cr_frame }}",
}


@pytest.mark.parametrize("name", KNOWN_ESCAPES)
def test_known_escapes_reach_nothing(name: str) -> None:
    shown = ""
    with suppress(ChatTemplateError, TemplateRenderError):
        shown = render(KNOWN_ESCAPES[name])
    # At most the name of a method that a template may call; nothing that leads further.
    for trace in ("class '", "__subclasses__ of", "__main__", "_globals", "co_consts", "frame"):
        assert trace not in shown
