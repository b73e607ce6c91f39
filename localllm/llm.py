"""Models in Python: `LLM(path).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias, cast

import numpy as np

from localllm.backends.program import FloatArray
from localllm.config import EngineConfig, parse_size
from localllm.engine.client import EngineClient, Inbox
from localllm.engine.local import LocalEngine
from localllm.engine.messages import EngineStats, Ready, SequenceNews, Submit, TokenLogprobs
from localllm.errors import RequestError
from localllm.gguf import GGUFFile
from localllm.sampling_params import SamplingParams
from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer, load_tokenizer

Prompt: TypeAlias = str | Sequence[int]
EndReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One choice. The end token, or the tokens of the stop string, are part of `token_ids` and not
    of `text`; `stop_reason` is that token or string, None at the end of `max_tokens`, context or
    grammar. `logprobs` has an entry for each of `token_ids`, where `SamplingParams` ask for it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: EndReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt; `text`, `token_ids` and `finish_reason` are its first choice's.

    `prompt_logprobs` are those of the prompt's tokens but the first, where they were asked for."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int  # of the prompt, served by the prefix cache
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> EndReason:
        return self.outputs[0].finish_reason


class LLM:
    """A model, loaded. Computes in a process of its own, which ends with `close`, when the object
    is collected, or with the interpreter; the reference backend computes in this process.

    The options are those of `localllm serve`; `kv_cache_memory` takes bytes or "48MB". ModelError
    when the file cannot be used, RequestError for options and parameters out of range. Methods may
    be called from several threads, whose work shares the engine's steps.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        isa: str = "auto",
        ctx_size: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | str | None = None,
        kv_cache_dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        fast: bool = False,
        prefix_cache: bool = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
    ) -> None:
        config = EngineConfig(
            model=Path(model),
            backend=backend,
            device=device,
            dtype=dtype,
            threads=threads,
            isa=isa,
            ctx_size=ctx_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=_bytes(kv_cache_memory),
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            fast=fast,
            prefix_cache=prefix_cache,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        in_process = backend == "reference"
        self._ids = count()
        self._engine = LocalEngine(config) if in_process else EngineClient(config)
        try:
            with GGUFFile.open(config.model) as file:
                self._engine.start()
                self._tokenizer = load_tokenizer(file)
            self.ready: Ready = self._engine.wait_ready()
        except BaseException:
            self._engine.close()
            raise

    @property
    def stats(self) -> EngineStats:
        """The engine's counts as of its latest step."""
        return self._engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Answers to all prompts, in their order, computed together.

        A prompt is a text or a list of token ids; a text gets the model's BOS, and the names of
        control tokens in it are these tokens, so that a prompt can be a rendered chat. `params` are
        for all prompts or one for each.
        """
        token_ids = [self._token_ids(prompt) for prompt in _as_list(prompts)]
        answers = [
            [_ChoiceReader(self._tokenizer, own, index) for index in range(own.n)]
            for own in _params_of_each(params, len(token_ids))
        ]
        self._run(
            (self._request(ids, reader.params, reader.index), reader)
            for ids, choices in zip(token_ids, answers, strict=True)
            for reader in choices
        )
        return [
            Generation(
                ids,
                [reader.completion() for reader in choices],
                choices[0].cached_tokens,
                choices[0].prompt_logprobs,
            )
            for ids, choices in zip(token_ids, answers, strict=True)
        ]

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Raw logits [n, vocab]: row i is what the model expects after token i."""
        request = self._request(self._token_ids(token_ids), SamplingParams(), prompt_logits=True)
        reader = _LogitsReader()
        self._run([(request, reader)])
        return np.concatenate(reader.parts)

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """`add_special`: with the BOS (and EOS) that the model wants. `parse_special`: names of
        control tokens in the text become these tokens, as in the prompts of `generate`.
        """
        return self._tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def close(self) -> None:
        """Ends the engine. What is being computed ends with EngineError."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, parse_special=True)
        if not _is_list(prompt) or not all(_is_token(item) for item in prompt):
            raise RequestError("a prompt is a text or a list of integer token ids", param="prompts")
        return [int(token) for token in prompt]

    def _request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        choice: int = 0,
        *,
        prompt_logits: bool = False,
    ) -> Submit:
        return Submit(
            sequence_id=str(next(self._ids)),
            prompt=tuple(token_ids),
            params=params,
            eos_ids=self._tokenizer.eog_ids,
            choice=choice,
            prompt_logits=prompt_logits,
        )

    def _run(self, work: Iterable[tuple[Submit, _Reader]]) -> None:
        """Submits all and reads their news to the end; on any error nothing is left behind."""
        inbox: Inbox = SimpleQueue()
        unfinished: dict[str, _Reader] = {}
        try:
            for request, reader in work:
                self._engine.submit(request, inbox)
                unfinished[request.sequence_id] = reader
            while unfinished:
                news = self._engine.next_news(inbox)
                if news.finish_reason == "error":
                    unfinished.pop(news.sequence_id, None)
                    raise news.failure()
                if (found := unfinished.get(news.sequence_id)) and found.take(news):
                    del unfinished[news.sequence_id]
                    if news.finish_reason is None:
                        self._engine.cancel(news.sequence_id)
        finally:
            for sequence_id in unfinished:
                self._engine.cancel(sequence_id)


class _Reader(Protocol):
    def take(self, news: SequenceNews) -> bool:
        """Whether nothing more is wanted."""


class _LogitsReader:
    def __init__(self) -> None:
        self.parts: list[FloatArray] = []

    def take(self, news: SequenceNews) -> bool:
        if news.logits is not None:
            self.parts.append(news.logits)
        return news.finish_reason is not None


class _ChoiceReader:
    """Puts one choice together, up to its end or its first stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int) -> None:
        self.params = params
        self.index = index
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._detokenizer = Detokenizer(tokenizer, params.stop, params.min_tokens)
        self._text = ""
        self._token_ids: list[int] = []
        self._end: EndReason = "stop"
        self._stop_id: int | None = None

    def take(self, news: SequenceNews) -> bool:
        self.cached_tokens = news.cached_tokens
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += news.prompt_logprobs
        for position, token in enumerate(news.tokens):
            self._token_ids.append(token)
            if self._logprobs is not None:
                self._logprobs.append(news.logprobs[position])
            if token != news.stop_id:
                self._text += self._detokenizer.push([token])
                if self._detokenizer.stopped_by is not None:
                    return True
        if news.finish_reason is None:
            return False
        self._text += self._detokenizer.finish()
        self._stop_id = news.stop_id
        if news.finish_reason == "length" and self._detokenizer.stopped_by is None:
            self._end = "length"
        return True

    def completion(self) -> Completion:
        reason = self._detokenizer.stopped_by or self._stop_id
        return Completion(
            self.index, self._text, self._token_ids, self._end, reason, self._logprobs
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        kind = type(prompts).__name__
        raise RequestError(f"prompts are texts or lists of token ids, not {kind}", param="prompts")
    if len(prompts) and all(_is_token(item) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _is_list(value: object) -> bool:
    """Arrays are as good as lists; bytes are no list of token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, n_prompts: int
) -> list[SamplingParams]:
    """One for each prompt, with the seed that all its choices share."""
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * n_prompts
    else:
        if not _is_list(params) or not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError("params must be SamplingParams, or a list of them", param="params")
        each = list(params)
    if len(each) != n_prompts:
        raise RequestError(f"{len(each)} params for {n_prompts} prompts", param="params")
    return [p if p.seed is not None else replace(p, seed=secrets.randbits(64)) for p in each]


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_size(size, "kv_cache_memory")
