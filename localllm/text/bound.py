"""How long a text may be, decided without tokenizing all of one that is far too long."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass

from localllm.errors import ContextLengthError, RequestError

PIECE = 2**16
"""Characters that are worked on in one go, where a text may have millions."""

_ORDINARY = 8  # characters to a token; few texts have more
_MARGIN = 2  # cuts between pieces may add tokens, but not as many as there are
_LONGEST_WHOLE = 2**20


@dataclass(frozen=True)
class TextBound:
    """`param` names the text where it is refused. `whole`: more tokens than the context are
    wanted, to count them or to keep the last; only the time and memory that they take is limited.
    """

    context: int
    param: str
    whole: bool = False

    def check(self, text: str, encode: Callable[[str], Sized]) -> None:
        """ContextLengthError where `text` has far more tokens than the context, else RequestError
        where it is too long to be tokenized. Closer counts are for the caller to compare."""
        if self.whole:
            most = max(_LONGEST_WHOLE, _ORDINARY * self.context)
            if len(text) > most:
                raise RequestError(
                    f"{self.param}: {len(text)} characters; at most {most} are tokenized here",
                    param=self.param,
                    code="string_above_max_length",
                )
        elif len(text) > max(PIECE, _ORDINARY * self.context):
            self._count(text, encode)

    def _count(self, text: str, encode: Callable[[str], Sized]) -> None:
        tokens = 0
        for start in range(0, len(text), PIECE):
            tokens += len(encode(text[start : start + PIECE]))
            if tokens > _MARGIN * self.context:
                raise ContextLengthError(tokens, self.context, param=self.param, counted_all=False)


def translated(text: str, table: dict[int, str]) -> str:
    """`text.translate(table)`, letting other threads run between pieces."""
    if len(text) <= PIECE:
        return text.translate(table)
    return "".join(
        text[start : start + PIECE].translate(table) for start in range(0, len(text), PIECE)
    )
