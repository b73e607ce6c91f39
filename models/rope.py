"""Rotary position embedding: from a file's scaling parameters to the frequencies of a RopeTable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from localllm.backends.program import RopeTable

ScalingKind: TypeAlias = Literal["none", "linear", "yarn", "longrope"]
SCALING_KINDS: tuple[str, ...] = get_args(ScalingKind)

Frequencies: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model trained on `original_context` positions was stretched `factor` times.

    `attention_factor` is the file's own multiplier of cos and sin. YaRN keeps the pairs that turn
    more than `beta_fast` times within the original context and stretches those that turn less than
    `beta_slow` times. `log_multiplier` is its weight of the magnitude correction in models that
    correct the attention scale as well.
    """

    kind: ScalingKind = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0


def rope_table(
    dims: int,
    base: float,
    *,
    interleaved: bool,
    scaling: RopeScaling | None = None,
    factors: Frequencies | None = None,
) -> RopeTable:
    """Frequencies of `dims` rotated dimensions. `factors` divide the unscaled ones, pair by pair.

    Longrope differs from linear scaling by its factors alone.
    """
    scaling = scaling or RopeScaling()
    frequencies = inverse_frequencies(dims, base)
    if factors is not None:
        frequencies = frequencies / factors
    if scaling.kind == "none":
        return RopeTable(frequencies, scaling.attention_factor, interleaved)
    if scaling.kind == "yarn":
        keep = yarn_kept_share(dims, base, scaling)
        frequencies = frequencies * ((1.0 - keep) / scaling.factor + keep)
        return RopeTable(frequencies, yarn_magnitude(scaling), interleaved)
    return RopeTable(frequencies / scaling.factor, scaling.attention_factor, interleaved)


def inverse_frequencies(dims: int, base: float) -> Frequencies:
    """base ** (-2j / dims) for each pair j."""
    return np.asarray(base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims))


def yarn_kept_share(dims: int, base: float, scaling: RopeScaling) -> Frequencies:
    """For each pair, the share (0 to 1) of the unscaled frequency in YaRN's blend of the two."""

    def pair_turning(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return (
            dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(0, math.floor(pair_turning(scaling.beta_fast)))
    high = min(dims - 1, math.ceil(pair_turning(scaling.beta_slow)))
    ramp = (np.arange(dims // 2, dtype=np.float64) - low) / max(0.001, high - low)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def yarn_magnitude(scaling: RopeScaling) -> float:
    """What cos and sin are multiplied by: 1 + 0.1 ln(factor), corrected by the file's own."""

    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1.0 else 1.0 + 0.1 * weight * math.log(scaling.factor)

    correction = magnitude(scaling.log_multiplier) if scaling.log_multiplier else 1.0
    return magnitude(1.0) / correction * scaling.attention_factor
