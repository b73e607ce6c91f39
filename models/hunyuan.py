"""Hunyuan, dense."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class Hunyuan(Decoder):
    head_norms = True
    norm_after_rope = True
