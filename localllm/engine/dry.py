"""DRY: makes it unlikely that the output repeats a passage of what came before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localllm.backends.base import Int32Array
from localllm.engine.vocabulary import Vocabulary
from localllm.sampling_params import SamplingParams

_LONGEST = 256  # repetitions are not measured further: by then the penalty is prohibitive


class Dry:
    """Reads one sequence's tokens, prompt and output, as they come."""

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary) -> None:
        self._params = params
        self._vocabulary = vocabulary
        self._breakers = [text.encode() for text in params.dry_sequence_breakers]
        self._longest_breaker = max(map(len, self._breakers), default=1)
        self._tail = b""
        self._since_break = 0  # tokens after the last one in which a breaker ended
        self._read = 0

    def penalties(self, tokens: Int32Array) -> tuple[Int32Array, npt.NDArray[np.float64]]:
        """Tokens that would lengthen a repetition, and what their logits lose. `tokens` are all of
        the sequence's so far."""
        self._watch_for_breakers(tokens)
        params = self._params
        if params.dry_penalty_last_n >= 0:
            tokens = tokens[len(tokens) - min(params.dry_penalty_last_n, len(tokens)) :]
        limit = min(self._since_break, _LONGEST, len(tokens) - 1)
        ids, lengths = _repetitions(tokens, limit)
        counts = lengths >= params.dry_allowed_length
        excess = lengths[counts] - params.dry_allowed_length
        with np.errstate(over="ignore"):
            lost = params.dry_multiplier * np.power(params.dry_base, excess.astype(np.float64))
        return ids[counts], np.minimum(lost, np.finfo(np.float32).max / 2)

    def _watch_for_breakers(self, tokens: Int32Array) -> None:
        for token in tokens[self._read :].tolist():
            data = self._tail + self._vocabulary.token_bytes[token]
            new = len(self._tail)
            if any(data.find(text, max(0, new - len(text) + 1)) >= 0 for text in self._breakers):
                self._since_break = 0
            else:
                self._since_break += 1
            self._tail = data[max(0, len(data) - self._longest_breaker + 1) :]
        self._read = len(tokens)


def _repetitions(tokens: Int32Array, limit: int) -> tuple[Int32Array, Int32Array]:
    """For every token that once followed a copy of the last tokens, the longest such copy.

    Copies are at most `limit` tokens long. They may overlap with the end that they copy.
    """
    last = len(tokens) - 1
    longest: dict[int, int] = {}
    places = np.arange(last) if limit > 0 else np.empty(0, np.int64)  # ends of copies
    for length in range(1, limit + 1):
        places = places[places >= length - 1]
        places = places[tokens[places - length + 1] == tokens[last - length + 1]]
        if not len(places):
            break
        for token in set(tokens[places + 1].tolist()):
            longest[token] = length
    return np.array(list(longest), np.int32), np.array(list(longest.values()), np.int32)
