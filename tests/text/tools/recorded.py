"""Answers with tool calls, cut out of prompts as the published chat templates render them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localllm.errors import TemplateRenderError
from localllm.text import reasoning
from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tools.formats import AnyFormat
from localllm.text.tools.schema import Tool, tools_of
from localllm.text.tools.table import recognise
from tests.helpers import chat_templates
from tests.text.vocabularies import published

Message = dict[str, Any]

DEFINITIONS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How many."},
                    "options": {"type": "object", "description": "Others."},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tells the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
TOOLS: tuple[Tool, ...] = tools_of(DEFINITIONS)
CITY = 'Grüße aus "Köln", {a}, [b]: <b>fett</b>\nzwei Zeilen'
WEATHER = {"city": CITY, "days": 3, "options": {"list": [1, 2.5, None, True], "text": "x, y"}}
CALLS = [("get_weather", WEATHER), ("now", {})]
QUESTION: Message = {"role": "user", "content": "What is it like?"}
CONTENT = "Let me see."
THOUGHT = "Hmm, the weather."

_ENDS = re.compile(
    "|".join(
        (
            r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>|<\|endoftext\|>|</s>|<sep>",
            r"<seed:eos>|<\|END_OF_TURN_TOKEN\|>|<end_of_sentence>|\[e~\[|<turn\|>|<\|eot\|>",
            r"<\|tool_response>|<\uff5cend\u2581of\u2581sentence\uff5c>|<\|role_end\|>|</assistant>|\n?<SPECIAL_12>",
            r"<\|message_sep\|>\n\n\Z|\n<\|end\|>\n|<\|call\|>|<\|assistant_end\|>",
        )
    )
)


@dataclass(frozen=True)
class Recorded:
    """What a model of this template would have generated, and where the prompt left it."""

    template: str
    format: AnyFormat
    reasoning: ReasoningFormat | None
    thinking: Thinking
    text: str
    calls: tuple[tuple[str, Any], ...]


def call_message(calls: Sequence[tuple[str, Any]], **more: Any) -> Message:
    return {
        "role": "assistant",
        "content": CONTENT,
        "tool_calls": [
            {
                "id": f"abcdefgh{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ],
        **more,
    }


@cache
def recorded(path: Path) -> Recorded | None:
    """None for templates that do not show the calls of earlier turns."""
    template = published(path)
    format = recognise(template.source)
    if format is None:
        return None
    marks = reasoning.recognise(template.source)
    prompt = template.render([QUESTION], tools=DEFINITIONS)
    for calls in (CALLS, CALLS[:1]):
        for more in _VARIANTS:
            try:
                whole = template.render(
                    [QUESTION, call_message(calls, **more)],
                    tools=DEFINITIONS,
                    add_generation_prompt=False,
                )
            except TemplateRenderError:
                continue
            text, thinking = _answer_in(whole, prompt, marks)
            if all(name in text for name, _ in calls):
                return Recorded(path.stem, format, marks, thinking, text, tuple(calls))
    return None


_VARIANTS: tuple[Message, ...] = (
    {"reasoning_content": THOUGHT, "thinking": THOUGHT},
    {"reasoning_content": THOUGHT},
    {"content": ""},
)


def _answer_in(whole: str, prompt: str, marks: ReasoningFormat | None) -> tuple[str, Thinking]:
    """What of a rendered conversation the model would have written after the prompt."""
    pairs = zip(whole, prompt, strict=False)
    start = next((at for at, (a, b) in enumerate(pairs) if a != b), len(prompt))
    while start and re.search(r"[\w<|/\uff5c]\Z", whole[:start]) and start < len(prompt):
        start -= 1  # the prompts part within a tag
    text = whole[start:]
    if end := _ENDS.search(text):
        text = text[: end.start()]
    begun = marks is not None and THOUGHT in text and marks.opens.strip() not in text
    return text, Thinking.OPEN if begun else Thinking.POSSIBLE


def all_recorded() -> list[Recorded]:
    found = [recorded(path) for path in chat_templates()]
    return [one for one in found if one is not None]
