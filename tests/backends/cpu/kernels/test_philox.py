"""Known answers of the Random123 library for Philox4x32-10."""

import numba
import pytest

from localllm.backends.cpu.kernels.philox import philox4x32, uniform

VECTORS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@numba.njit
def native(key, counter):  # type: ignore[no-untyped-def]
    return philox4x32(key, counter)


@numba.njit
def native_uniform(seed, choice, index):  # type: ignore[no-untyped-def]
    return uniform(seed, choice, index)


@pytest.mark.parametrize(("key", "counter", "words"), VECTORS)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, int, int, int]
) -> None:
    assert native(key, counter) == words


def test_uniform_takes_the_seeds_halves_as_key_and_24_bits() -> None:
    seed = 0x299F31D0_A4093822
    words = native((0xA4093822, 0x299F31D0), (7, 3, 0, 0))
    assert native_uniform(seed, 3, 7) == (words[0] >> 8) / 2**24
    assert (
        native_uniform(-1, 0, 0) == (native((0xFFFFFFFF, 0xFFFFFFFF), (0, 0, 0, 0))[0] >> 8) / 2**24
    )
