"""Llama and what is converted as it: Mistral, SmolLM 2, TinyLlama, Mixtral. Also ERNIE 4.5."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class Llama(Decoder):
    """Files of this family hold q and k with their rows permuted for interleaved rotation."""

    interleaved_rope = True
