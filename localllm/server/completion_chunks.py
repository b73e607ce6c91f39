"""OpenAI's shapes for answers of /v1/completions: whole, and as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localllm.engine.messages import TokenLogprobs
from localllm.server.chunks import FINGERPRINT, Writer, usage_of
from localllm.server.generation import Answer, Delta, Job, TokenUsage, best_answers
from localllm.server.logprobs import (
    completion_logprobs,
    echo_logprobs,
    joined,
    prompt_logprobs,
)
from localllm.server.protocol.answers import Completion, CompletionChoice, Timings
from localllm.server.protocol.completions import CompletionRequest
from localllm.server.shown_tokens import ShownToken
from localllm.text.tokenizer import Tokenizer


class CompletionWriter(Writer):
    """`echoes` are the prompts' texts, where the answers are to begin with them."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(
        self,
        model_id: str,
        tokenizer: Tokenizer,
        timings: Callable[[], Mapping[str, Any]],
        body: CompletionRequest,
        jobs: Sequence[Job],
        echoes: Sequence[str] | None,
    ) -> None:
        super().__init__(model_id, tokenizer, timings)
        self._body = body
        self._jobs = jobs
        self._echoes = echoes
        # of a stream: choices that have not begun, with what their prompts' logprobs are so far
        self._unopened = {index: list[TokenLogprobs]() for index in range(len(jobs) * body.n_drawn)}

    def whole(self, answers: Sequence[Answer], usage: TokenUsage) -> Completion:
        wanted = self._body.n or 1
        if self._body.n_drawn > wanted:
            answers = best_answers(answers, self._body.n_drawn, wanted)
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model_id,
            choices=[
                self._choice(index, answer, index // wanted) for index, answer in enumerate(answers)
            ],
            usage=usage_of(usage),
            system_fingerprint=FINGERPRINT,
            timings=Timings(**self._timings()),
        )

    def _choice(self, index: int, answer: Answer, job: int) -> CompletionChoice:
        echo, start = self._echo(job, answer.prompt_logprobs)
        told = prompt_logprobs(self._tokenizer, answer.prompt_logprobs)
        return CompletionChoice.model_validate(
            {
                "index": index,
                "text": self._echo_text(job) + answer.text,
                "logprobs": self._logprobs([*echo], answer.shown, start),
                "prompt_logprobs": told if self._body.prompt_logprobs is not None else None,
                "finish_reason": answer.finish_reason,
            }
        )

    def _chunk_choices(self, delta: Delta) -> Iterator[dict[str, Any]]:
        index, job = delta.index, delta.index // self._body.n_drawn
        echo: list[dict[str, Any]] = []
        text = delta.text
        start = len(self._echo_text(job))
        if (known := self._unopened.get(index)) is not None:
            known += delta.prompt_logprobs
            if not (delta.tokens or delta.finish_reason):
                return
            del self._unopened[index]
            echo, _ = self._echo(job, known)
            text = self._echo_text(job) + text
        logprobs = None
        if echo or delta.shown:
            logprobs = self._logprobs(echo, delta.shown, start)
        if text or (logprobs and not delta.finish_reason):
            yield _choice(index, text, logprobs)
            logprobs = None
        if delta.finish_reason:
            yield _choice(index, "", logprobs, delta.finish_reason)

    def _echo_text(self, job: int) -> str:
        return self._echoes[job] if self._echoes is not None else ""

    def _echo(self, job: int, known: Sequence[TokenLogprobs]) -> tuple[list[dict[str, Any]], int]:
        """The prompt's part of the logprobs, if there is one, and where the completion's begins."""
        text = self._echo_text(job)
        if self._echoes is None or self._body.logprobs is None:
            return [], len(text)
        return [echo_logprobs(self._tokenizer, self._jobs[job].prompt, known, text)], len(text)

    def _logprobs(
        self, echo: list[dict[str, Any]], shown: Sequence[ShownToken], start: int
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return joined([*echo, completion_logprobs(self._tokenizer, shown, start)])


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
