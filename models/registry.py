"""Which class records which architecture. Only strings: a family is imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

from localllm.errors import UnsupportedArchitectureError
from localllm.models.decoder import Decoder

ARCHITECTURES: Mapping[str, str] = {
    "cohere2": "cohere:Cohere2",
    "command-r": "cohere:CommandR",
    "ernie4_5": "llama:Llama",
    "exaone4": "exaone:Exaone4",
    "gemma": "gemma:Gemma",
    "gemma2": "gemma:Gemma2",
    "gemma3": "gemma:Gemma3",
    "glm4": "glm:Glm4",
    "granite": "granite:Granite",
    "granitemoe": "granite:Granite",
    "hunyuan-dense": "hunyuan:Hunyuan",
    "llama": "llama:Llama",
    "minicpm": "granite:MiniCPM",
    "mistral3": "mistral:Mistral3",
    "olmo2": "olmo:Olmo2",
    "olmoe": "olmo:Olmoe",
    "phi2": "phi:Phi2",
    "phi3": "phi:Phi3",
    "phimoe": "phi:Phi3",
    "qwen2": "qwen:Qwen2",
    "qwen3": "qwen:Qwen3",
    "qwen3moe": "qwen:Qwen3",
    "smollm3": "smollm:SmolLM3",
    "stablelm": "stablelm:StableLM",
    "starcoder2": "starcoder:Starcoder2",
}


def decoder_class(architecture: str) -> type[Decoder]:
    """The class for a file's `general.architecture`; UnsupportedArchitectureError if none."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; known are {known}"
        )
    module, name = ARCHITECTURES[architecture].split(":")
    return cast(type[Decoder], getattr(import_module(f"localllm.models.{module}"), name))
