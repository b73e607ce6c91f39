"""How models mark the thinking before an answer, and whether a prompt has begun it already."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class ReasoningFormat:
    """Thinking stands between `opens` and `closes`, at the beginning of an answer."""

    opens: str
    closes: str


class Thinking(Enum):
    """Where a prompt leaves the model."""

    POSSIBLE = "possible"
    OPEN = "open"
    OVER = "over"


FORMATS = (
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ReasoningFormat("◁think▷", "◁/think▷"),  # Kimi-VL
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command-A
    ReasoningFormat("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningFormat("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel 1.6
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("<thinking>", "</thinking>"),  # Apriel 1.5
)


def recognise(template: str) -> ReasoningFormat | None:
    """The first of which both marks are in the template's source."""
    for candidate in FORMATS:
        marks = (candidate.opens.strip(), candidate.closes.strip())
        if all(mark in template for mark in marks):
            return candidate
    return None


def state_after(prompt: str, reasoning: ReasoningFormat) -> Thinking:
    """What the end of a rendered prompt, with its special tokens, leaves the model to do."""
    end = prompt.rstrip()
    if end.endswith(reasoning.opens.strip()):
        return Thinking.OPEN
    if end.endswith(reasoning.closes.strip()):
        return Thinking.OVER
    return Thinking.POSSIBLE
