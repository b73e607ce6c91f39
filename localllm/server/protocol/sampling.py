"""The sampling and stopping fields that chat and completions share."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field

from localllm.errors import RequestError
from localllm.sampling_params import MAX_SEED, SamplingParams
from localllm.server.protocol.base import RequestBody, not_supported
from localllm.server.protocol.grammar_fields import GrammarFields

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_WORDS = 100

_COPIED = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "prompt_logprobs",
    "typical_p",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
_TokenIdKey = Annotated[int, Field(strict=False)]  # JSON's keys are strings
_Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class SamplingFields(GrammarFields):
    """`null` is the default everywhere. `top_k` -1 is off, as 0; `seed` -1 draws one, as null.

    `truncate_prompt_tokens` keeps the last so many tokens of a prompt, -1 as many as leave room for
    `max_tokens`; the answer's usage and a header tell how many were cut off. What mirostat, DRY and
    XTC do stands at `SamplingParams`.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = Field(None, description="Another name of repetition_penalty")
    logit_bias: dict[_TokenIdKey, _Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_WORDS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_WORDS)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    mirostat: int | None = Field(None, description="0 (off) or 2")
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the most likely tokens to tell with each one; None: not even its own."""
        return None

    def sampling_params(self, vocab_size: int, max_tokens: int | None) -> SamplingParams:
        """The fields as the engine takes them, with a seed in any case; RequestError if bad.

        Takes a while where there is a grammar.
        """
        self._check_token_ids(vocab_size)
        self._check_stream()
        given: dict[str, Any] = {name: getattr(self, name) for name in _COPIED}
        given["repetition_penalty"] = self._repetition_penalty()
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        given["logit_bias"] = self.logit_bias
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        given["stop_token_ids"] = self.stop_token_ids
        given["max_tokens"] = max_tokens
        given["logprobs"] = self.top_logprobs_wanted
        given["grammar"] = self.wanted_grammar()
        if max_tokens == 0 and self.prompt_logprobs is None:
            given["prompt_logprobs"] = 0  # the one thing that there is to do
        set_fields = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(seed=self._seed(), **set_fields)

    def _repetition_penalty(self) -> float | None:
        if self.repetition_penalty is None:
            return self.repeat_penalty
        return self.repetition_penalty

    def _seed(self) -> int:
        if self.seed is None or self.seed == -1:
            return secrets.randbits(64)
        return self.seed % (MAX_SEED + 1)

    def _check_stream(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            raise not_supported("prompt_logprobs", "not in a stream")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
            )

    def _check_token_ids(self, vocab_size: int) -> None:
        ids = {"logit_bias": self.logit_bias or (), "stop_token_ids": self.stop_token_ids or ()}
        for name, values in ids.items():
            for token in values:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name}: token id {token} is not in the vocabulary of {vocab_size}",
                        param=name,
                    )


SAMPLING_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "cache_salt": ("",),
    "dynatemp_range": (0,),
    "guided_structural_tag": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
    "n_probs": (0,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "top_n_sigma": (0, -1),
    "use_beam_search": (False,),
}
