"""What a parser finds in a model's output, in the order in which it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegins:
    """`index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A fragment; all fragments of a call in a row are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    index: int


Event: TypeAlias = Content | Reasoning | CallBegins | Arguments | CallEnds


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """All events of an answer put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegins(_, id, name):
                    self.calls.append(Call(id, name))
                case Arguments(index, text):
                    self.calls[index].arguments += text


def joined(events: Iterable[Event]) -> list[Event]:
    """Fragments of the same kind in a row as one."""
    result: list[Event] = []
    for event in events:
        match result[-1] if result else None, event:
            case (Content() as last, Content(text)) | (Reasoning() as last, Reasoning(text)):
                result[-1] = replace(last, text=last.text + text)
            case (Arguments(index) as last, Arguments(same, text)) if index == same:
                result[-1] = replace(last, text=last.text + text)
            case _:
                result.append(event)
    return result
