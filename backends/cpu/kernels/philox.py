"""Philox4x32-10, the counter-based random numbers of Salmon et al. (SC 2011)."""

from __future__ import annotations

from localllm.backends.cpu.kernel import helper

_MASK = 0xFFFFFFFF
_MULTIPLY_0, _MULTIPLY_2 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@helper
def philox4x32(
    key: tuple[int, int], counter: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """Four random words of 32 bits; key and counter are words of 32 bits too."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # A product may pass 2**63: it wraps, and its two halves are right all the same.
        p0, p2 = _MULTIPLY_0 * c0, _MULTIPLY_2 * c2
        c0, c1 = ((p2 >> 32) ^ c1 ^ k0) & _MASK, p2 & _MASK
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


@helper
def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) of one token, a multiple of 2**-24; see `SamplingArrays`."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word, _, _, _ = philox4x32(key, (index, choice, 0, 0))
    return (word >> 8) * 2.0**-24
