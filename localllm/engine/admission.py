"""What the engine accepts: checked by the caller before it submits, and again by the engine."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine.messages import Submit
from localllm.errors import ContextLengthError, RequestError


@dataclass(frozen=True)
class Admission:
    """The bounds of a loaded model; ids beyond them would reach native code as bad indices."""

    context: int
    vocab_size: int

    def check(self, request: Submit) -> None:
        """Raises RequestError; ContextLengthError unless one more token fits behind the prompt
        (or none is wanted)."""
        if not request.prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        least = 0 if request.prompt_logits or request.params.max_tokens == 0 else 1
        if len(request.prompt) + least > self.context:
            raise ContextLengthError(len(request.prompt), self.context)
        self._check_ids(request.prompt, "prompt")
        self._check_ids(request.params.logit_bias, "logit_bias")

    def _check_ids(self, ids: tuple[int, ...] | dict[int, float], param: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise RequestError(
                f"{param} has token ids outside 0..{self.vocab_size - 1}", param=param
            )
