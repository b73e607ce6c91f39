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
MAX_LOGPROBS = 100  # most likely tokens told of one position
MOST_WORDS = 1000  # of bad_words and of sequence breakers, in all
LONGEST_WORD = 1000  # characters

_INTEGERS = ("top_k", "n", "min_tokens", "dry_allowed_length", "dry_penalty_last_n", "mirostat")
_OPTIONAL_INTEGERS = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; the defaults sample from the model's distribution.

    Order of application: logit_bias, penalties, DRY, then what may not be drawn at all (grammar,
    bad_words, ...), temperature, then the filters top_k, typical_p, top_p, min_p and XTC on the
    resulting probabilities, then one draw. `temperature` 0 takes the most likely token after bias
    and penalties. `top_k` 0 and `top_p` 1 are off.
    `repetition_penalty` looks at prompt and output, `presence_penalty` and `frequency_penalty`
    at the output alone. `seed` None draws one at admission. `stop` strings are cut from the text.

    The output has at least `min_tokens` tokens: before that neither an end-of-generation token nor
    one of `stop_token_ids` comes, and stop strings do not count. No text of `bad_words` comes up in
    it. `grammar` and `thinking_budget` restrict what comes further.

    `logprobs` k asks for the log-probability of each token and of the k most likely ones, by the
    model's distribution before all of the above; `prompt_logprobs` for those of the prompt's tokens
    but the first. With the latter `max_tokens` may be 0.

    The rest is slower. `typical_p` keeps the tokens whose surprise is nearest to the mean, up to
    that probability. DRY takes multiplier * base ** (length - allowed_length) from what would make
    a repetition longer that is `length` tokens long, within the last `dry_penalty_last_n` tokens
    (-1: all, 0: off) and not across a sequence breaker. XTC, with `xtc_probability`, drops all
    tokens of probability `xtc_threshold` or more but the least likely of them. `mirostat` 2 stands
    in for the filters: it keeps the surprise of the output near `mirostat_tau` bits.
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
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    thinking_budget: ThinkingBudget | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    typical_p: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "dry_sequence_breakers"):
            self._take_texts(name)
        self._check_integers()
        self._check_logit_bias()
        self._check_ranges()
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError("seed must be between 0 and 2**64 - 1", param="seed")
        if self.mirostat not in (0, 2):
            raise RequestError(
                f"mirostat must be 0 (off) or 2, not {self.mirostat}",
                param="mirostat",
                code="unsupported_parameter",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than the {self.max_tokens} of max_tokens",
                param="min_tokens",
            )

    @property
    def has_penalty(self) -> bool:
        """Whether what was said before changes what is likely."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _take_texts(self, name: str) -> None:
        value: object = getattr(self, name)  # one string is as good as a tuple of one
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, Iterable):
            raise RequestError(f"{name} must be texts, not {value!r}", param=name)
        texts = tuple(texts)
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name} must be texts", param=name)
        if any(not text for text in texts):
            what = "stop strings" if name == "stop" else f"{name}: texts"
            raise RequestError(f"{what} must not be empty", param=name)
        if len(texts) > MOST_WORDS:
            raise RequestError(f"{name}: {len(texts)} texts; {MOST_WORDS} are the most", param=name)
        longest = max(map(len, texts), default=0)
        if longest > LONGEST_WORD:
            raise RequestError(
                f"{name}: a text of {longest} characters; {LONGEST_WORD} are the most", param=name
            )
        object.__setattr__(self, name, texts)

    def _check_integers(self) -> None:
        for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
            value = getattr(self, name)
            if not _is_integer(value) and not (value is None and name in _OPTIONAL_INTEGERS):
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

    def _check_ranges(self) -> None:
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_p", 0.0, 1.0, open_low=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("typical_p", 0.0, 1.0, open_low=True)
        self._check_range("dry_multiplier", 0.0, 100.0)
        self._check_range("dry_base", 1.0, 100.0)
        self._check_range("xtc_probability", 0.0, 1.0)
        self._check_range("xtc_threshold", 0.0, 1.0)
        self._check_range("mirostat_tau", 0.0, 100.0)
        self._check_range("mirostat_eta", 0.0, 1.0)
        self._check_least("top_k", 0, " (off)")
        self._check_least("n", 1)
        self._check_least("max_tokens", 1 if self.prompt_logprobs is None else 0)
        self._check_least("min_tokens", 0)
        self._check_least("dry_allowed_length", 1)
        self._check_least("dry_penalty_last_n", -1, " (all)")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_least(name, 0)
            if (getattr(self, name) or 0) > MAX_LOGPROBS:
                raise RequestError(f"{name} must be at most {MAX_LOGPROBS}", param=name)

    def _check_least(self, name: str, least: int, meaning: str = "") -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise RequestError(f"{name} must be at least {least}{meaning}, not {value}", param=name)

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
