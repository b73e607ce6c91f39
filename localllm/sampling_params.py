"""What a caller may ask of one generated sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from localllm.errors import RequestError
from localllm.grammar import GrammarSpec, ThinkingBudget

GREEDY_TEMPERATURE = 0.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; the defaults sample from the model's distribution.

    Order of application: logit_bias, penalties, temperature, then the filters top_k, top_p and
    min_p on the resulting probabilities, then one draw. `temperature` 0 takes the most likely
    token after bias and penalties. `top_k` 0 and `top_p` 1 are off.
    `repetition_penalty` looks at prompt and output, `presence_penalty` and `frequency_penalty`
    at the output alone. `seed` None draws one at admission. `stop` strings are cut from the text.
    `grammar` and `thinking_budget` restrict the tokens that may be drawn at all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    thinking_budget: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop  # one string is as good as a tuple of one
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        self._check_integers()
        self._check_logit_bias()
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_p", 0.0, 1.0, open_low=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        if self.top_k < 0:
            raise RequestError(f"top_k must be 0 (off) or more, not {self.top_k}", param="top_k")
        if self.n < 1:
            raise RequestError(f"n must be at least 1, not {self.n}", param="n")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens"
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError("seed must be between 0 and 2**64 - 1", param="seed")
        if any(not s for s in self.stop):
            raise RequestError("stop strings must not be empty", param="stop")

    def _check_integers(self) -> None:
        for name in ("top_k", "n", "max_tokens", "seed"):
            value = getattr(self, name)
            if not _is_integer(value) and not (value is None and name in ("max_tokens", "seed")):
                raise RequestError(f"{name} must be an integer, not {value!r}", param=name)
        given: object = self.stop_token_ids
        ids = tuple(given) if isinstance(given, Iterable) else (None,)
        if not all(_is_integer(token) and token >= 0 for token in ids):
            raise RequestError(
                "stop_token_ids must be token ids, integers of 0 or more", param="stop_token_ids"
            )
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_logit_bias(self) -> None:
        bias: object = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_integer(token) and _is_real(value) and math.isfinite(value)
            for token, value in bias.items()
        ):
            raise RequestError(
                "logit_bias must map integer token ids to finite numbers", param="logit_bias"
            )

    def _check_range(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_real(value):
            raise RequestError(f"{name} must be a number, not {value!r}", param=name)
        inside = (low < value if open_low else low <= value) and value <= high
        if not inside:  # also catches NaN
            bracket = "(" if open_low else "["
            raise RequestError(
                f"{name} must be in {bracket}{low:g}, {high:g}], not {value}", param=name
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
