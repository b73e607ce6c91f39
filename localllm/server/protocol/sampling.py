"""The sampling and stopping fields that chat and completions share."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field

from localllm.errors import RequestError
from localllm.sampling_params import MAX_SEED, SamplingParams
from localllm.server.protocol.base import RequestBody

MAX_CHOICES = 128
MAX_STOPS = 16

_COPIED = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "ignore_eos",
)
_TokenIdKey = Annotated[int, Field(strict=False)]  # JSON's keys are strings
_Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class SamplingFields(RequestBody):
    """`null` is the default everywhere. `top_k` -1 is off, as 0; `seed` -1 draws one, as null."""

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

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, vocab_size: int, max_tokens: int | None) -> SamplingParams:
        """The fields as the engine takes them, with a seed in any case; RequestError if bad."""
        self._check_token_ids(vocab_size)
        given: dict[str, Any] = {name: getattr(self, name) for name in _COPIED}
        given["repetition_penalty"] = self._repetition_penalty()
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        given["logit_bias"] = self.logit_bias
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        given["stop_token_ids"] = self.stop_token_ids
        given["max_tokens"] = max_tokens
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
    "bad_words": ([],),
    "cache_salt": ("",),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "priority": (0,),
    "prompt_logprobs": (0, False),
    "structured_outputs": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
