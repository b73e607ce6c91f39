"""How model families write tool calls: one entry of data each.

The facts are those of the families' own chat templates. `grammar` writes exactly this; `calls`
reads it, more leniently where whitespace and the order of keys are concerned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from localllm.text.reasoning import ReasoningFormat


@dataclass(frozen=True, kw_only=True)
class JsonCall:
    """`{"name": "f", "arguments": {...}}`. `id_pattern`: of an id beside them, under `id_key`."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_pattern: str = ""
    id_first: bool = False


@dataclass(frozen=True)
class KeyedCall:
    """`{"f": {...}}`"""


@dataclass(frozen=True, kw_only=True)
class NamedCall:
    """A name between `before` and `after`, then the arguments as JSON.

    `number_pattern`: of what stands between the name and `after`. `number_in_id`: `before`, the
    name and that are the call's id.
    """

    before: str = ""
    after: str
    number_pattern: str = ""
    number_in_id: bool = False


@dataclass(frozen=True, kw_only=True)
class TaggedCall:
    """The name, and each argument's key and value, between tags.

    Values are bare text for strings, else JSON. `text_key`: what stands for `key[1]` after the
    key of a string, where that differs. `cdata`: text may be in a CDATA section. `loose`: models
    of this format differ in where they break lines.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    text_key: str = ""
    end: str
    cdata: bool = False
    loose: bool = False


@dataclass(frozen=True)
class PythonCall:
    """`f(key='value', other=3)`"""


@dataclass(frozen=True)
class GemmaCall:
    """`call:f{key:<|"|>value<|"|>,other:3}`"""


Body: TypeAlias = JsonCall | KeyedCall | NamedCall | TaggedCall | PythonCall | GemmaCall


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Calls between `opens` and `closes`, each between `begins` and `ends`, `between` in between.

    `listed`: as the elements of a list in brackets. `signs`: texts that are all in a template of
    this format. `parallel`: an answer may have several calls. `id_length`: ids are so many letters
    and digits. `known_names`: what begins like a call is one only if it names a tool.
    """

    name: str
    signs: tuple[str, ...]
    body: Body
    opens: str = ""
    begins: str = ""
    ends: str = ""
    between: str = ""
    closes: str = ""
    listed: bool = False
    parallel: bool = True
    id_length: int | None = None
    known_names: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that stand around and within calls."""
        texts = [self.opens, self.begins, self.ends, self.between, self.closes]
        match self.body:
            case NamedCall(before=before, after=after):
                texts += [before, after]
            case TaggedCall() as tags:
                texts += [*tags.name, *tags.key, *tags.value, tags.text_key, tags.end]
            case GemmaCall():
                texts.append(GEMMA_QUOTE)
        return tuple(text for text in texts if text)


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Output as messages, each with a header that says what it is: `starts` HEADER `message` TEXT.

    Patterns for headers: of reasoning, and of calls, whose group is the tool's name; all others
    head content. `ends` end a message. The prompt ends with `starts`.
    """

    starts: str
    message: str
    ends: tuple[str, ...]
    reasoning: str = r"(?!)"
    call: str


@dataclass(frozen=True, kw_only=True)
class ChannelFormat:
    """Arguments are a message of their own. `call` and `content` are headers to write."""

    name: str
    signs: tuple[str, ...]
    channels: Channels
    call_header: tuple[str, str]
    content_header: str
    thinking: tuple[str, str] = ("", "")
    ends: str
    inner: ToolFormat | None = None
    parallel: bool = False
    id_length: int | None = None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The message that is thinking."""
        opens = self.thinking[0]
        return ReasoningFormat(opens, self.channels.ends[0]) if opens else None

    @property
    def markers(self) -> tuple[str, ...]:
        c = self.channels
        inner = self.inner.markers if self.inner else ()
        texts = (c.starts, c.message, *c.ends, *self.call_header, self.content_header)
        return tuple(text for text in (*texts, *self.thinking, self.ends, *inner) if text)


AnyFormat: TypeAlias = ToolFormat | ChannelFormat

GEMMA_QUOTE = '<|"|>'
