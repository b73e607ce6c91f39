"""A model's output, as it comes, to content, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.text.reasoning import ReasoningFormat, Thinking
from localllm.text.tools.call import CallIds, NotACallError, OpenCall, random_id
from localllm.text.tools.calls import read_call
from localllm.text.tools.events import (
    CallBegins,
    CallEnds,
    Content,
    Event,
    Reasoning,
    joined,
)
from localllm.text.tools.formats import (
    AnyFormat,
    ChannelFormat,
    JsonCall,
    ToolFormat,
)
from localllm.text.tools.json_calls import read_arguments
from localllm.text.tools.reader import Emit, Read, Reader
from localllm.text.tools.schema import Tool

_NAMES = re.compile(r'\s*\{\s*"name"')
_STRAY = tuple("}]) \t\r\n")  # beyond what closes a call, as models write it now and then


class _Trimmed:
    """Emits text without the whitespace around it; inner whitespace waits for what follows."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""
        self._begun = False

    def __call__(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        kept = len(text.rstrip())
        self._held = text[kept:]
        if kept:
            self._begun = True
            self._emit(text[:kept])

    def release(self) -> None:
        """Nothing follows: whitespace at the end of an answer is part of it."""
        if self._held and self._begun:
            self._emit(self._held)
        self._held = ""


class OutputParser:
    """Feed it with `push`, end with `finish`; however the text is cut, the events say the same.

    `format` None: no tools are called. `thinking`: where the prompt leaves the model. `required`:
    all but the thinking is calls.
    """

    def __init__(
        self,
        format: AnyFormat | None,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningFormat | None = None,
        thinking: Thinking = Thinking.POSSIBLE,
        new_id: CallIds | None = None,
        required: bool = False,
    ) -> None:
        self._format = format
        self._tools = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._events: list[Event] = []
        self._reader = Reader()
        self._reader.sure = self._required = required
        self._among_calls = self._in_call = False
        self._n_calls = 0
        id_length = format.id_length if format else None
        self._new_id: CallIds = new_id or (lambda: random_id(id_length))
        emit: Emit = lambda text: self._emit(Content(text))  # noqa: E731
        self._content = _Trimmed(emit) if format or reasoning else emit
        self.thinking = thinking == Thinking.OPEN
        self._machine = self._run(thinking)
        next(self._machine, None)

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        self._reader.push(text)
        next(self._machine, None)
        return self._take()

    @property
    def calling(self) -> bool:
        """Whether what comes next belongs to a call, or stands between calls."""
        return self._among_calls or self._in_call or (self._required and not self.thinking)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """`cut`: the text was going to go on. A call that is cut keeps the arguments that it has,
        and what was surely going to be the mark of a call is dropped."""
        self._reader.finish(cut=cut)
        next(self._machine, None)
        if isinstance(self._content, _Trimmed) and not self._n_calls:
            self._content.release()
        return self._take()

    def _emit(self, event: Event) -> None:
        match event:
            case CallBegins():
                self._in_call = self._reader.sure = True
            case CallEnds():
                self._in_call, self._reader.sure = False, self._required
        self._events.append(event)

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _run(self, thinking: Thinking) -> Read[None]:
        match self._format:
            case ChannelFormat() as format:
                if thinking == Thinking.OPEN:
                    yield from self._reason(format.channels.ends)
                    yield from self._next_message(format)
                yield from self._messages(format)
            case format:
                if self._reasoning and thinking != Thinking.OVER:
                    yield from self._think(self._reasoning, thinking)
                yield from self._body(format, ())

    def _think(self, reasoning: ReasoningFormat, thinking: Thinking) -> Read[None]:
        if thinking == Thinking.POSSIBLE:
            self._reader.mark()
            yield from self._reader.spaces()
            opened = yield from self._reader.accept(reasoning.opens.strip())
            if not opened and not (self._required and self._reader.cut_off):
                self._content(self._reader.taken)
            self._reader.forget()
            if not opened:
                return
        yield from self._reason([reasoning.closes.strip()])

    def _reason(self, ends: Sequence[str]) -> Read[str | None]:
        self.thinking = True
        emit = _Trimmed(lambda text: self._emit(Reasoning(text)))
        end = yield from self._reader.until(ends, emit)
        self.thinking = False
        return end

    def _body(self, format: ToolFormat | None, ends: Sequence[str]) -> Read[None]:
        """Content and calls, up to one of `ends`."""
        starts = _starts(format)
        if format and not starts:
            yield from self._one(format, "")
        while True:
            marker = yield from self._reader.until([*starts, *ends], self._content)
            if marker is None or format is None or marker in ends:
                return
            self._among_calls = True
            yield from self._calls(format, marker)
            self._among_calls = False

    def _calls(self, format: ToolFormat, marker: str) -> Read[None]:
        """The calls after the marker that begins them; content again if they are none."""
        reader = self._reader
        if not format.opens:  # the marker begins a call, and may be part of it
            yield from self._one(format, marker)
            return
        before = marker
        while True:
            yield from reader.spaces()
            if format.listed:
                while (yield from reader.accept_any(("[", ","))):
                    yield from reader.spaces()
                if (yield from reader.accept("]")):
                    yield from reader.spaces()
                    yield from reader.accept(format.closes.strip())
                    return
            if format.closes and (yield from reader.accept(format.closes.strip())):
                return
            if reader.ended:
                return
            begins = format.begins.strip()
            if begins and (yield from reader.accept(begins)):
                before += begins
            elif begins:
                return
            if not (yield from self._one(format, before)):
                return
            before = ""

    def _one(self, format: ToolFormat, before: str) -> Read[bool]:
        """One call, if it is one; `before` is what has been taken for it."""
        reader = self._reader
        reader.mark()
        names = self._tools if format.known_names else None
        call = OpenCall(self._n_calls, self._new_id, self._emit, reader, names)
        try:
            yield from reader.spaces()
            yield from read_call(format.body, reader, call, self._tools)
        except NotACallError:
            if not (reader.ended and self._was_going_to_be(format, before)):
                self._content(before + reader.taken)
            reader.forget()
            return False
        self._n_calls += 1
        if format.ends:
            while (yield from reader.peek()) in _STRAY:
                reader.skip(1)
            yield from reader.accept(format.ends.strip())
        call.end()
        return True

    def _was_going_to_be(self, format: ToolFormat, before: str) -> bool:
        """Whether what has been taken for a call, and ends with the text, was one."""
        if self._required or not format.known_names:
            return True
        names = isinstance(format.body, JsonCall) and _NAMES.match(before + self._reader.taken)
        return bool(names) and self._reader.cut_off

    def _messages(self, format: ChannelFormat) -> Read[None]:
        channels, reader = format.channels, self._reader
        while not reader.ended:
            header: list[str] = []
            if (yield from reader.until([channels.message], header.append)) is None:
                marked = any(mark in "".join(header) for mark in format.markers)
                if not (marked or (self._required and reader.cut_off)):
                    self._content("".join(header))
                return
            text = "".join(header).strip()
            if re.search(channels.reasoning, text):
                yield from self._reason(channels.ends)
            elif match := re.search(channels.call, text):
                yield from self._message_call(format, match[1])
            else:
                ends = channels.ends or (channels.starts,)
                yield from self._body(format.inner, ends)
            yield from self._next_message(format)

    def _next_message(self, format: ChannelFormat) -> Read[None]:
        yield from self._reader.spaces()
        yield from self._reader.accept(format.channels.starts)

    def _message_call(self, format: ChannelFormat, name: str) -> Read[None]:
        call = OpenCall(self._n_calls, self._new_id, self._emit, self._reader)
        self._n_calls += 1
        call.begin(name)
        yield from read_arguments(self._reader, call)
        call.end()
        ends = format.channels.ends or (format.channels.starts,)
        yield from self._reader.until(ends, lambda _: None)


def _starts(format: ToolFormat | None) -> tuple[str, ...]:
    """The text by which the first call is told from content."""
    start = (format.opens or format.begins).strip() if format else ""
    return (start,) if start else ()
