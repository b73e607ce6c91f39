"""StarCoder 2."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class Starcoder2(Decoder):
    norm_kind = "layer"
    activation = "gelu_tanh"
    feed_forward_kind = "plain"
