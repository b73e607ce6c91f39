"""An engine that says what it is told, and a client that sees every byte as it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from itertools import chain, cycle, repeat
from typing import Any, Self

from starlette.types import ASGIApp, Message

from localllm.engine.messages import EngineStats, Ready, SequenceNews, Submit, TokenLogprobs
from localllm.errors import EngineError
from localllm.text.tokenizer import Tokenizer

CONTEXT = 300
MAX_BODY_BYTES = 100_000


class FakeEngine:
    """Answers every sequence with one of `answers` in turn, a token at a time, then with
    end-of-sequence tokens.

    The log-probability of each token is that of `logprob_of`.

    `hold_after` n stops every sequence after n tokens until `release`; `fail` ends them instead,
    and so does `cancel` for one of them.
    """

    def __init__(self, tokenizer: Tokenizer, *answers: str) -> None:
        assert tokenizer.eos_id is not None
        self.say(*answers)
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_id
        self.context = CONTEXT
        self.ready: Ready | None = None
        self.healthy = False
        self.failed: str | None = None
        self.restarts = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self.hold_after: int | None = None
        self.failure: str | None = None
        self.submitted: list[Submit] = []
        self.cancelled: list[str] = []
        self.live: set[str] = set()
        self.closed = False
        self.loadable = asyncio.Event()
        self.loadable.set()
        self.load_error: Exception | None = None
        self.cancel_seen = asyncio.Event()
        self._released = False
        self._held: dict[str, asyncio.Event] = {}

    def say(self, *answers: str) -> None:
        self._answers = cycle(answers)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            kv_usage=len(self.live) / 100,
            preemptions=self.preemptions,
        )

    async def start(self) -> Ready:
        await self.loadable.wait()
        if self.load_error is not None:
            raise self.load_error
        self.ready = Ready(
            architecture="fake",
            backend="fake",
            device="no device at all",
            threads=1,
            context=self.context,
            vocab_size=self._tokenizer.vocab_size,
            kv_blocks=(64,),
            kv_bytes=2**20,
            load_seconds=0.0,
        )
        self.healthy = True
        return self.ready

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceNews, None]:
        self.submitted.append(request)
        self.live.add(request.sequence_id)
        answer = self._tokenizer.encode(next(self._answers), add_special=False, parse_special=True)
        if request.params.max_tokens == 0:
            yield self._with_prompt(request, SequenceNews(request.sequence_id, (), "length"))
            return
        try:
            for count, token in enumerate(chain(answer, repeat(self._eos))):
                if count == self.hold_after and not self._released:
                    self._held[request.sequence_id] = asyncio.Event()
                    await self._held[request.sequence_id].wait()
                if request.sequence_id in self.cancelled:
                    yield SequenceNews(request.sequence_id, finish_reason="cancelled")
                    return
                if self.failure is not None:
                    raise EngineError(self.failure)
                news = self._news(request, token, count + 1)
                yield self._with_prompt(request, news) if count == 0 else news
                if news.finish_reason:
                    return
        finally:
            self.live.discard(request.sequence_id)

    def _news(self, request: Submit, token: int, count: int) -> SequenceNews:
        stops = token in request.eos_ids and not request.params.ignore_eos
        stops = stops or token in request.params.stop_token_ids
        full = count == request.params.max_tokens
        return SequenceNews(
            request.sequence_id,
            (token,),
            finish_reason="stop" if stops else "length" if full else None,
            stop_id=token if stops else None,
            cached_tokens=self.cached_tokens,
            logprobs=() if request.params.logprobs is None else (logprob_of(token, request),),
        )

    def _with_prompt(self, request: Submit, news: SequenceNews) -> SequenceNews:
        if request.params.prompt_logprobs is None:
            return news
        told = tuple(logprob_of(token, request) for token in request.prompt[1:])
        return replace(news, prompt_logprobs=told)

    def release(self) -> None:
        self._released = True
        for held in self._held.values():
            held.set()

    def fail(self, message: str) -> None:
        self.failure = message
        self.release()

    def cancel(self, sequence_id: str) -> None:
        self.cancelled.append(sequence_id)
        self.live.discard(sequence_id)
        if sequence_id in self._held:
            self._held[sequence_id].set()
        self.cancel_seen.set()

    async def close(self) -> None:
        self.closed = True
        self.fail("The engine was closed")


def logprob_of(token: int, request: Submit) -> TokenLogprobs:
    """-token/1000, the most likely one; after it come the next ids of GPT-2."""
    asked = max(request.params.logprobs or 0, request.params.prompt_logprobs or 0)
    top = tuple(((token + i) % 50_257, -token / 1000 - i) for i in range(asked))
    return TokenLogprobs(token, -token / 1000, 1, top)


class Exchange:
    """One HTTP request to an ASGI application, seen from the wire.

    A context manager: leaving it hangs up and waits until the application is done.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Without a body, one is announced and never comes."""
        all_headers = {"content-type": "application/json", **(headers or {})}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in all_headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self._to_app.put_nowait({"type": "http.request", "body": content, "more_body": False})
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.hang_up()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        await self._app(self._scope, self._to_app.get, self._from_app.put)

    def hang_up(self) -> None:
        self._to_app.put_nowait({"type": "http.disconnect"})

    @property
    def unread(self) -> int:
        """Messages that the application has not asked for."""
        return self._to_app.qsize()

    async def next_body(self) -> bytes | None:
        """The next part of the answer's body as it was sent; None at its end."""
        if self._ended:
            return None
        message = await self._from_app.get()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return await self.next_body()
        self._ended = not message.get("more_body", False)
        body: bytes = message["body"]
        return body or await self.next_body()

    async def rest(self) -> bytes:
        """Everything that is still to come, for answers that end."""
        parts = []
        while (part := await self.next_body()) is not None:
            parts.append(part)
        return b"".join(parts)


def events_of(body: bytes) -> list[Any]:
    """Data of server-sent events, parsed; `[DONE]` as it is, comments left out."""
    assert body.endswith(b"\n\n")
    blocks = [block for block in body.decode().split("\n\n") if block and block[0] != ":"]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def first_event(lines: Iterator[str]) -> str:
    """The data of the next event; comments, which a slow machine brings, are passed over."""
    return next(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
