"""One command turns a GGUF model into a fast endpoint; `LLM` is the same engine in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.llm import LLM, Completion, Generation
    from localllm.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "Generation", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports late, so that importing a small part of the package stays quick."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from localllm import llm

    return getattr(llm, name)
