"""What a file says about rotary positions."""

from __future__ import annotations

from typing import cast

from localllm.models.keys import Keys
from localllm.models.rope import SCALING_KINDS, Frequencies, RopeScaling, ScalingKind
from localllm.models.tensors import Tensors


def read_rope_scaling(keys: Keys, trained_context: int) -> RopeScaling:
    """A factor without a type is linear scaling, by the older key of that name too."""
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in SCALING_KINDS:
        keys.refuse("rope.scaling.type", f"is {kind!r}, expected one of {', '.join(SCALING_KINDS)}")
    factor = keys.not_negative("rope.scaling.factor", keys.not_negative("rope.scale_linear", 0.0))
    log_multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if log_multiplier < 0:
        keys.refuse(
            "rope.scaling.yarn_log_multiplier", f"is {log_multiplier:g}, expected 0 or more"
        )
    return RopeScaling(
        kind=cast(ScalingKind, kind),
        factor=factor or 1.0,  # files say 0 for "none"
        original_context=keys.count("rope.scaling.original_context_length", trained_context),
        attention_factor=keys.positive("rope.scaling.attn_factor", 1.0),
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=keys.not_negative("rope.scaling.yarn_log_multiplier", 0.0),
    )


def read_rope_factors(tensors: Tensors, dims: int, *, long_context: bool) -> Frequencies | None:
    """Divisors of the frequencies, where the file has any.

    Files with two sets mean the long one for sequences beyond the original context, and for all of
    their positions: which one is used is settled once, by the context that is asked for.
    """
    if tensors.has("rope_freqs.weight"):
        return tensors.divisors("rope_freqs.weight", dims // 2)
    long, short = "rope_factors_long.weight", "rope_factors_short.weight"
    if tensors.has(long) or tensors.has(short):
        return tensors.divisors(long if long_context else short, dims // 2)
    return None
