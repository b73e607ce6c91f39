"""OpenAI's shapes for the answer of a generation: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from localllm.server.event_stream import DONE, encode_event
from localllm.server.generation import Answer, Delta, Generation, TokenUsage
from localllm.server.generation import FinishReason as EndReason
from localllm.server.logprobs import chat_logprobs, prompt_logprobs
from localllm.server.protocol.answers import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    CompletionTokensDetails,
    FinishReason,
    MessageToolCall,
    PromptTokensDetails,
    Timings,
    Usage,
)
from localllm.server.protocol.logprobs import ChatLogprobs
from localllm.server.service import VERSION
from localllm.server.shown_tokens import ShownToken
from localllm.text.tokenizer import Tokenizer
from localllm.text.tools.events import (
    Arguments,
    CallBegins,
    Content,
    Event,
    ParsedAnswer,
    Reasoning,
)

FINGERPRINT = f"localllm-{VERSION}"


def usage_of(tokens: TokenUsage) -> Usage:
    return Usage(
        prompt_tokens=tokens.prompt_tokens,
        completion_tokens=tokens.completion_tokens,
        total_tokens=tokens.prompt_tokens + tokens.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=tokens.cached_tokens, truncated_tokens=tokens.truncated_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=tokens.reasoning_tokens),
    )


class Writer:
    """What both APIs share: an id, a time and a name that stay the same for one answer."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, model_id: str, tokenizer: Tokenizer, timings: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._tokenizer = tokenizer
        self._timings = timings
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model_id = model_id

    async def stream(
        self, generation: Generation, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, `[DONE]` last. `timings` stand in the last chunk."""
        extra: dict[str, Any] = {"usage": None} if include_usage else {}
        unfinished = generation.n_choices
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                unfinished -= delta.finish_reason is not None
                for choice in self._chunk_choices(delta):
                    if choice["finish_reason"] and not unfinished and not include_usage:
                        extra["timings"] = self._timings()
                    yield encode_event(self._chunk([choice], extra))
        if include_usage:
            usage = usage_of(generation.usage).model_dump()
            last = {"usage": usage, "timings": self._timings()}
            yield encode_event(self._chunk([], last))
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model_id,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **extra,
        }

    def _chunk_choices(self, delta: Delta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class ChatWriter(Writer):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model_id: str,
        tokenizer: Tokenizer,
        timings: Callable[[], Mapping[str, Any]],
        wants_logprobs: bool = False,
    ) -> None:
        super().__init__(model_id, tokenizer, timings)
        self._wants_logprobs = wants_logprobs
        self._opened: set[int] = set()
        self._calling: set[int] = set()

    def _logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, shown) if self._wants_logprobs else None

    def whole(self, answers: Sequence[Answer], usage: TokenUsage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=_message(answer.parsed),
                logprobs=ChatLogprobs.model_validate(self._logprobs(answer.shown))
                if self._wants_logprobs
                else None,
                finish_reason=_finish_reason(answer.finish_reason, bool(answer.parsed.calls)),
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model_id,
            choices=choices,
            usage=usage_of(usage),
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=self._prompt_logprobs(answers[0]),
            timings=Timings(**self._timings()),
        )

    def _prompt_logprobs(self, answer: Answer) -> Any:
        if not answer.prompt_logprobs:
            return None
        return prompt_logprobs(self._tokenizer, answer.prompt_logprobs)

    def _chunk_choices(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Role once, before the first fragment; the end by itself."""
        index = delta.index
        if index not in self._opened and (delta.events or delta.finish_reason):
            self._opened.add(index)
            yield _chat_choice(index, {"role": "assistant", "content": ""})
        shown = self._logprobs(delta.shown) if delta.shown else None
        for event in delta.events:
            if isinstance(event, CallBegins):
                self._calling.add(index)
            if (fragment := _fragment(event)) is not None:
                yield _chat_choice(index, fragment, shown)
                shown = None
        if delta.finish_reason:
            reason = _finish_reason(delta.finish_reason, index in self._calling)
            yield _chat_choice(index, {}, shown, reason)
        elif shown is not None:  # of tokens that are marks, or whose text is held back
            yield _chat_choice(index, {"content": ""}, shown)


def _message(parsed: ParsedAnswer) -> AssistantMessage:
    calls = [
        MessageToolCall(
            id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in parsed.calls
    ]
    return AssistantMessage(
        content=None if calls and not parsed.content else parsed.content,
        reasoning_content=parsed.reasoning or None,
        reasoning=parsed.reasoning or None,
        tool_calls=calls or None,
    )


def _fragment(event: Event) -> dict[str, Any] | None:
    """A delta. What clients put together by appending comes once: a call's id, type and name."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegins(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _finish_reason(reason: EndReason, calls: bool) -> FinishReason:
    return "tool_calls" if calls and reason == "stop" else reason


def _chat_choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
