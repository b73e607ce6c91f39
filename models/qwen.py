"""Qwen 2 and 3, dense and mixtures: what sets them apart is which tensors are there."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class Qwen2(Decoder):
    """The common decoder."""


class Qwen3(Decoder):
    head_norms = True
