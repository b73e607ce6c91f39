"""OpenAI's shapes for the answer of a generation: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from localllm.server.event_stream import DONE, encode_event
from localllm.server.generation import Answer, Delta, Generation, TokenUsage
from localllm.server.logprobs import chat_logprobs, prompt_logprobs
from localllm.server.protocol.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    PromptTokensDetails,
    Timings,
    Usage,
)
from localllm.server.protocol.logprobs import ChatLogprobs
from localllm.server.service import VERSION
from localllm.server.shown_tokens import ShownToken
from localllm.text.tokenizer import Tokenizer

FINGERPRINT = f"localllm-{VERSION}"


def usage_of(tokens: TokenUsage) -> Usage:
    return Usage(
        prompt_tokens=tokens.prompt_tokens,
        completion_tokens=tokens.completion_tokens,
        total_tokens=tokens.prompt_tokens + tokens.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=tokens.cached_tokens, truncated_tokens=tokens.truncated_tokens
        ),
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

    def _logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, shown) if self._wants_logprobs else None

    def whole(self, answers: Sequence[Answer], usage: TokenUsage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=answer.text),
                logprobs=ChatLogprobs.model_validate(self._logprobs(answer.shown))
                if self._wants_logprobs
                else None,
                finish_reason=answer.finish_reason,
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
        """Role once, before the first text; the end by itself."""
        if delta.index not in self._opened and (delta.text or delta.finish_reason):
            self._opened.add(delta.index)
            yield _chat_choice(delta.index, {"role": "assistant", "content": ""})
        shown = self._logprobs(delta.shown) if delta.shown else None
        if delta.text:
            yield _chat_choice(delta.index, {"content": delta.text}, shown)
            shown = None
        if delta.finish_reason:
            yield _chat_choice(delta.index, {}, shown, delta.finish_reason)


def _chat_choice(
    index: int,
    delta: dict[str, str],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
