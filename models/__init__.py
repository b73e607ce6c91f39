"""Models: from a GGUF file to the program that backends compile."""

from __future__ import annotations

from localllm.backends.program import Program
from localllm.gguf import GGUFFile
from localllm.models.info import ModelInfo
from localllm.models.keys import Keys
from localllm.models.registry import ARCHITECTURES, decoder_class

__all__ = ["ARCHITECTURES", "ModelInfo", "build_program", "trained_context"]


def build_program(file: GGUFFile, max_context: int) -> Program:
    """Records the file's model for sequences of up to `max_context` positions.

    Raises UnsupportedArchitectureError with the list of known names, or GGUFError naming the key
    or tensor that does not fit.
    """
    return decoder_class(file.architecture)(file, max_context).build()


def trained_context(file: GGUFFile) -> int:
    """Positions that the model was trained (or stretched) for."""
    return Keys(file).count("context_length")
