"""Phi 2, 3 and the Phi 3.5 mixture.

Files of Phi 3 name a sliding window, but not which layers have it: like llama.cpp, all are full.
"""

from __future__ import annotations

from localllm.models.decoder import Decoder
from localllm.models.parallel import ParallelDecoder


class Phi2(ParallelDecoder):
    norm_kind = "layer"
    activation = "gelu_tanh"
    feed_forward_kind = "plain"


class Phi3(Decoder):
    feed_forward_kind = "fused"
