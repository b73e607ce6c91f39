"""One template: compiled, tried out, and run on conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeAlias

from jinja2.meta import find_undeclared_variables

from localllm.errors import ChatTemplateError, TemplateRenderError
from localllm.text.special_tokens import is_control_like, is_markup
from localllm.text.splitter import SpecialTokenSplitter
from localllm.text.templates.limits import MAX_SIZE, LimitError, budget, start_budget
from localllm.text.templates.mask import Exempt, Mask
from localllm.text.templates.messages import Capabilities, Message, adapt, fold_system, regular
from localllm.text.templates.probe import probe
from localllm.text.templates.sandbox import (
    InputList,
    TemplateRefusalError,
    TemplateSandbox,
    string_constants,
)
from localllm.text.tokenizer import Tokenizer

Hide: TypeAlias = Callable[[str, str], str]
"""Text of a message, and the message's role, to the text that the template sees."""

_MAX_SOURCE = 1_000_000
_NO_ROLE = ""  # of tools, documents and variables


class CompiledTemplate:
    """Made once, run for each request. ChatTemplateError if the source cannot be parsed."""

    def __init__(self, source: str, name: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self.name = name
        self._tokenizer = tokenizer
        if len(source) > _MAX_SOURCE:
            raise ChatTemplateError(f"chat template {name!r}: over {_MAX_SOURCE} characters long")
        sandbox = TemplateSandbox()
        try:
            parsed = sandbox.parse(source)
            self._constants = set(string_constants(parsed))
            self._variables = find_undeclared_variables(parsed)
            self._template = sandbox.from_string(source)
        except Exception as error:  # of Jinja, or of Python where the nesting is too deep
            raise ChatTemplateError(f"chat template {name!r}: {_one_line(error)}") from error
        self._special_texts = {"bos_token": "", "eos_token": ""} | {
            variable: tokenizer.token_text(token)
            for variable, token in (
                ("bos_token", tokenizer.bos_id),
                ("eos_token", tokenizer.eos_id),
                ("unk_token", tokenizer.unk_id),
                ("pad_token", tokenizer.pad_id),
            )
            if token is not None
        }

    @cached_property
    def can(self) -> Capabilities:
        try:
            return probe(self._attempt, developer_role="developer" in self._constants)
        except LimitError:  # nothing that it could render matters
            return Capabilities()

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], hide: Hide
    ) -> str:
        """The prompt. Where the template refuses messages as they are, they are made regular."""
        others = dict(variables)
        if not others.get("tools"):
            others["tools"] = None if self.can.null_tools else []

        def run(adapted: list[Message]) -> str:
            shown = [_hidden(message, hide, message["role"]) for message in adapted]
            return self._run(_hidden(others, hide, _NO_ROLE) | {"messages": InputList(shown)})

        try:
            adapted = adapt(messages, self.can)
            return self._run_or_repair(adapted, run)
        except RecursionError:
            raise TemplateRenderError(
                "The messages are nested too deeply", param="messages"
            ) from None

    def _run_or_repair(self, adapted: list[Message], run: Callable[[list[Message]], str]) -> str:
        try:
            return run(adapted)
        except TemplateRenderError as refusal:
            if isinstance(refusal.__cause__, LimitError):
                raise
            repaired = regular(adapted)
            if not self.can.system_role:
                repaired = fold_system(repaired)
            if repaired == adapted:
                raise
            try:
                return run(repaired)
            except TemplateRenderError:
                raise refusal from None

    def hide(self, text: str, role: str) -> str:
        """Text from outside the template, so written that no special token can come of it."""
        exempt = self._exempt_in_answers if role == "assistant" else self._exempt
        return self._mask.hide(text, exempt)

    def cut(self, prompt: str) -> Iterator[int | str]:
        """Cuts a prompt with hidden texts at its special tokens, and shows the texts again."""
        for part in self._special.split(prompt):
            if isinstance(part, int):
                yield part
            else:
                yield from self._ordinary.split(self._mask.reveal(part))

    def _run(self, variables: Mapping[str, Any]) -> str:
        start_budget()
        try:
            return self._generate(variables)
        except TemplateRefusalError as error:
            raise TemplateRenderError(
                f"The chat template refused the messages: {error}", param="messages"
            ) from error
        except Exception as error:  # whatever a template can run into
            raise TemplateRenderError(
                f"The chat template failed: {_one_line(error)}", param="messages"
            ) from error

    def _attempt(self, messages: list[Message], tools: list[Message] | None) -> str | None:
        start_budget(trial=True)
        variables = {"messages": messages, "tools": tools, "documents": None}
        try:
            return self._generate({**variables, "add_generation_prompt": True})
        except LimitError:
            raise
        except Exception:
            return None

    def _generate(self, variables: Mapping[str, Any]) -> str:
        chunks, size = [], 0
        variables = {**self._special_texts, **self._other_names(variables["tools"]), **variables}
        for chunk in self._template.generate(variables):
            budget().step()
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_SIZE:
                raise LimitError(f"the prompt has more than {MAX_SIZE} characters")
        return "".join(chunks)

    def _other_names(self, tools: Any) -> dict[str, Any]:
        """What single families ask for beyond transformers' own variables."""
        others = {
            "datetime": datetime.now(UTC).strftime("%b %d %Y %H:%M:%S GMT"),  # FireFunction
            "functions": json.dumps(tools, ensure_ascii=False, indent=2) if tools else "",
            "xml_tools": tools,  # SmolLM3
        }
        return {name: value for name, value in others.items() if name in self._variables}

    @cached_property
    def _protected(self) -> tuple[frozenset[str], frozenset[str]]:
        """Special tokens that only the template may write, and markup that answers may have too.

        Other user-defined tokens (runs of spaces, HTML tags) are ordinary text in any place.
        """
        control, markup = set(), set()
        for text, token in self._tokenizer.special_tokens.items():
            if not self._tokenizer.is_user_defined(token) or is_control_like(text):
                control.add(text)
            elif is_markup(text):
                markup.add(text)
        return frozenset(control), frozenset(markup)

    @cached_property
    def _mask(self) -> Mask:
        control, markup = self._protected
        return Mask(control | markup)

    @cached_property
    def _exempt(self) -> Exempt:
        control, markup = self._protected
        return self._mask.exempt(self._constants, control | markup)

    @cached_property
    def _exempt_in_answers(self) -> Exempt:
        control, markup = self._protected
        return self._mask.exempt(self._constants | markup, control)

    @cached_property
    def _special(self) -> SpecialTokenSplitter:
        return self._tokenizer.splitter(self._tokenizer.special_tokens)

    @cached_property
    def _ordinary(self) -> SpecialTokenSplitter:
        control, markup = self._protected
        return self._tokenizer.splitter(
            {
                text: token
                for text, token in self._tokenizer.special_tokens.items()
                if text not in control and text not in markup
            }
        )


def _hidden(value: Any, hide: Hide, role: str) -> Any:
    """A copy that the template may not change, with its texts hidden."""
    if isinstance(value, str):
        return hide(value, role)
    if isinstance(value, Mapping):
        return {_hidden(k, hide, role): _hidden(v, hide, role) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return InputList(_hidden(element, hide, role) for element in value)
    return value


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
