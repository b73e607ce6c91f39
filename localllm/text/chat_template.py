"""Conversations to prompts, by the chat template in the model file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from localllm.errors import ChatTemplateError, GGUFError, RequestError
from localllm.gguf import GGUFFile
from localllm.text import reasoning
from localllm.text.bound import TextBound
from localllm.text.reasoning import ReasoningFormat
from localllm.text.templates.compiled import CompiledTemplate
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools import table
from localllm.text.tools.formats import AnyFormat

log = logging.getLogger(__name__)

_DEFAULT = "default"
_KEYS = {
    _DEFAULT: "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
    "rag": "tokenizer.chat_template.rag",
}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CALLED = "Xq7calledXq7"
_CALL_IN_THE_PAST: list[dict[str, Any]] = [
    {"role": "user", "content": "Call it."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefgh0",
                "type": "function",
                "function": {"name": _CALLED, "arguments": {}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefgh0", "content": "Done."},
]
_ITS_DEFINITION = [
    {
        "type": "function",
        "function": {
            "name": "another",
            "description": "Does nothing.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


class ChatTemplate:
    """Made by `load`. Safe to use from several threads."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`sources` has a template named `default`, and may have `tool_use` and `rag`."""
        self._tokenizer = tokenizer
        self._templates = {
            name: CompiledTemplate(source, name, tokenizer) for name, source in sources.items()
        }

    @classmethod
    def load(cls, file: GGUFFile, tokenizer: Tokenizer) -> Self:
        """ChatTemplateError where a template cannot be parsed; ChatML where there is none."""
        try:
            sources = {
                name: file.get_str(key) for name, key in _KEYS.items() if key in file.metadata
            }
        except GGUFError as error:
            raise ChatTemplateError(str(error)) from error
        if _DEFAULT not in sources:
            log.warning("The model file has no chat template; conversations are written as ChatML")
            sources[_DEFAULT] = CHATML
        return cls(sources, tokenizer)

    @property
    def name(self) -> str:
        """`default` for that of the file, `chatml` where it has none."""
        return "chatml" if self.source == CHATML else _DEFAULT

    @property
    def source(self) -> str:
        return self._templates[_DEFAULT].source

    @property
    def supports_tools(self) -> bool:
        return any(template.can.tools for template in self._templates.values())

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the calls of earlier turns appear in the prompt."""
        try:
            return _CALLED in self.render(_CALL_IN_THE_PAST, tools=_ITS_DEFINITION)
        except RequestError:
            return False

    @cached_property
    def call_format(self) -> AnyFormat | None:
        """How the model calls tools, as its template shows it; None where it does not."""
        return table.recognise(self._choose(True, None).source)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model marks its thinking, where its template knows that it does."""
        return reasoning.recognise(self._choose(True, None).source)

    @property
    def supports_system(self) -> bool:
        """Otherwise what system messages say is put before the first turn of the user."""
        return self._templates[_DEFAULT].can.system_role

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation in OpenAI's format.

        TemplateRenderError (a RequestError) where the template refuses the messages.
        """
        template = self._choose(tools, documents)
        variables.update(
            tools=tools, documents=documents or None, add_generation_prompt=add_generation_prompt
        )
        return template.render(messages, variables, _shown)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        bound: TextBound | None = None,
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The prompt as token ids, with BOS once where the model wants it.

        Special tokens of the template are those tokens; what messages, tools and documents say
        is text, whatever it looks like. A prompt that `bound` refuses raises its RequestError.
        """
        template = self._choose(tools, documents)
        variables.update(
            tools=tools, documents=documents or None, add_generation_prompt=add_generation_prompt
        )
        prompt = template.render(messages, variables, template.hide)

        def encode(text: str) -> list[int]:
            return self._tokenizer.encode_parts(template.cut(text))

        if bound is not None:
            bound.check(prompt, encode)
        ids = encode(prompt)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _choose(self, tools: object, documents: object) -> CompiledTemplate:
        for wanted, name in ((tools, "tool_use"), (documents, "rag")):
            if wanted and name in self._templates:
                return self._templates[name]
        return self._templates[_DEFAULT]


def _shown(text: str, _role: str) -> str:
    return text
