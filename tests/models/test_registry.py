from __future__ import annotations

import subprocess
import sys

import pytest

from localllm.errors import UnsupportedArchitectureError
from localllm.models.decoder import Decoder
from localllm.models.registry import ARCHITECTURES, decoder_class

FIRST_WAVE = """llama qwen2 qwen3 qwen3moe gemma gemma2 gemma3 phi3 mistral3 granite smollm3 olmo2
command-r cohere2 starcoder2"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_entry_names_a_decoder(architecture: str) -> None:
    assert issubclass(decoder_class(architecture), Decoder)


def test_the_first_wave_is_there() -> None:
    assert set(FIRST_WAVE.split()) <= set(ARCHITECTURES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="'mamba9' is not supported") as refusal:
        decoder_class("mamba9")
    assert all(name in str(refusal.value) for name in ARCHITECTURES)


def test_families_are_imported_when_needed() -> None:
    script = "import sys, localllm.models; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    families = {f"localllm.models.{entry.split(':')[0]}" for entry in ARCHITECTURES.values()}
    assert "localllm.models.registry" in loaded
    assert not families & set(loaded)
