"""Vector operations against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from localllm.backends.cpu.simd import (
    absolute,
    address_of,
    as_i16x8,
    atomic_add,
    broadcast_f32x8,
    extract,
    f16_to_f32,
    f32_to_f16,
    floor,
    fma,
    i16_to_i32,
    i32_to_f32,
    i32_to_i8,
    lanes_below,
    load_acquire,
    load_f16x8,
    load_f32x8,
    load_i32x8,
    load_masked_f32x8,
    mask_bits,
    max_f32,
    max_i32,
    maximum,
    minimum,
    pause,
    prefetch,
    round_to_i32,
    scalar_load_f16,
    scalar_load_i8,
    scalar_load_i16,
    scalar_load_u8,
    scalar_load_u16,
    scalar_load_u32,
    scalar_store_f32,
    scalar_store_i64,
    select,
    shift_left,
    shift_right,
    shift_right_signed,
    splat_f32x8,
    splat_i32x8,
    sqrt,
    store_f16x8,
    store_f32x8,
    store_i8x8,
    store_i32x8,
    store_masked_f32x8,
    store_release,
    sum_f32,
    sum_i32,
    vexp,
)

Array: TypeAlias = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
LANES = 8


def compiled(function: F) -> F:
    return cast(F, njit(function))


def over(operation: Any, *inputs: Array) -> Array:
    """operation(f32x8, ...) -> f32x8 applied to whole float32 arrays."""

    @compiled
    def one(x: Array, out: Array) -> None:
        for i in range(0, x.size * 4, 32):
            store_f32x8(address_of(out), i, operation(load_f32x8(address_of(x), i)))

    @compiled
    def two(x: Array, y: Array, out: Array) -> None:
        for i in range(0, x.size * 4, 32):
            a, b = load_f32x8(address_of(x), i), load_f32x8(address_of(y), i)
            store_f32x8(address_of(out), i, operation(a, b))

    out = np.empty_like(inputs[0])
    if len(inputs) == 1:
        one(inputs[0], out)
    else:
        two(inputs[0], inputs[1], out)
    return out


def floats(n: int, scale: float = 10, seed: int = 0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def test_arithmetic_and_selection() -> None:
    @compiled
    def mixed(a: Any, b: Any) -> Any:
        smaller = select(a < b, a, b)
        larger = maximum(a, b)
        product = fma(a, b, smaller) - larger * floor(minimum(a, b))
        product += sqrt(absolute(b)) / larger
        return select(a >= splat_f32x8(0.0), product, smaller)

    x, y = floats(800), floats(800, seed=1)
    with np.errstate(all="ignore"):
        fused = (x.astype(np.float64) * y + np.minimum(x, y)).astype(np.float32)
        product = fused - np.maximum(x, y) * np.floor(np.minimum(x, y))
        product = product + np.sqrt(np.abs(y)) / np.maximum(x, y)
    expected = np.where(x >= 0, product, np.minimum(x, y))
    assert np.array_equal(over(mixed, x, y), expected)


def test_extrema_take_the_second_where_one_is_nan() -> None:
    x = np.array([np.nan, 1, np.nan, 2, 0, 0, 0, 0], np.float32)
    y = np.array([1, np.nan, np.nan, 1, 0, 0, 0, 0], np.float32)
    for operation, at in ((maximum, np.maximum), (minimum, np.minimum)):
        plain = compiled(lambda a, b, operation=operation: operation(a, b))
        found = over(plain, x, y)
        assert np.array_equal(found[[0, 3]], at(y[[0, 3]], np.where(np.isnan(x), y, x)[[0, 3]]))
        assert np.all(np.isnan(found[1:3]))


def test_the_exponential_is_accurate_and_tame() -> None:
    plain = compiled(lambda x: vexp(x))
    x = np.linspace(-87, 88, 80000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(over(plain, x) / exact - 1).max() < 1e-7
    special = np.array([0, -np.inf, np.inf, np.nan, -88, 1e30, -1e30, 1e-30], np.float32)
    found = over(plain, special)
    assert found[0] == 1
    assert found[7] == 1
    assert np.all(found[[1, 4, 6]] == 0)
    assert np.isnan(found[3])
    assert np.all(found[[2, 5]] > 1e38)


def test_every_float16_widens_to_itself() -> None:
    @compiled
    def widen(x: Array, vector: Array, scalar: Array) -> None:
        for i in range(0, x.size, LANES):
            store_f32x8(address_of(vector), 4 * i, f16_to_f32(load_f16x8(address_of(x), 2 * i)))
        for i in range(x.size):
            scalar[i] = scalar_load_f16(address_of(x), 2 * i)

    bits = np.arange(65536).astype(np.uint16)
    vector, scalar = np.empty(65536, np.float32), np.empty(65536, np.float32)
    widen(bits, vector, scalar)
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(vector, expected, equal_nan=True)
    assert np.array_equal(scalar, expected, equal_nan=True)


def test_float32_rounds_to_the_nearest_even_float16() -> None:
    @compiled
    def narrow(x: Array, out: Array) -> None:
        for i in range(0, x.size, LANES):
            store_f16x8(address_of(out), 2 * i, f32_to_f16(load_f32x8(address_of(x), 4 * i)))

    finite = np.arange(0x7C00).astype(np.uint16).view(np.float16).astype(np.float32)
    halfway = (finite[:-1] + finite[1:]) / 2
    edges = [halfway, np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(9e9))]
    special = np.array([65519.9, 65520, 1e9, np.inf, 2**-25, 2**-26, 1e-40, 0], np.float32)
    x = np.concatenate([finite, *edges, special, floats(4000, 1e-5)])
    x = np.concatenate([x, -x])
    x = x[: x.size // LANES * LANES]
    found = np.empty(x.size, np.uint16)
    narrow(x, found)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(found, expected)


def test_rounding_to_integers() -> None:
    @compiled
    def rounded(x: Array, nearest: Array, again: Array) -> None:
        for i in range(0, x.size * 4, 32):
            v = load_f32x8(address_of(x), i)
            store_i32x8(address_of(nearest), i, round_to_i32(v))
            store_f32x8(address_of(again), i, i32_to_f32(round_to_i32(v)))

    x = np.concatenate([np.arange(-50, 50) / 4, floats(900, 1e5), [-(2**22) + 1, 2**22 - 1, 0, 0]])
    x = x[: x.size // LANES * LANES].astype(np.float32)
    nearest, again = np.empty(x.size, np.int32), np.empty_like(x)
    rounded(x, nearest, again)
    assert np.array_equal(nearest, np.rint(x))
    assert np.array_equal(again, np.rint(x))


def test_integer_lanes() -> None:
    @compiled
    def shifted(x: Array, out: Array) -> None:
        v, w = load_i32x8(address_of(x), 0), load_i32x8(address_of(x), 32)
        to = address_of(out)
        store_i32x8(to, 0, shift_left(v, 3) ^ shift_right(v, 5))
        store_i32x8(to, 32, shift_right_signed(v, 7) + (v & splat_i32x8(255)))
        store_i32x8(to, 64, select(v > w, v, v | splat_i32x8(1)) * v)
        store_i32x8(to, 96, maximum(v, minimum(splat_i32x8(9), w)))
        store_i32x8(to, 128, i16_to_i32(as_i16x8(f32_to_f16(i32_to_f32(v)))))
        store_i8x8(to, 160, i32_to_i8(v))

    pair = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 8)).astype(np.int32)
    pair[0, 3] = pair[1, 3]
    out = np.zeros(42, np.int32)
    shifted(pair, out)
    x, y = pair
    with np.errstate(over="ignore"):
        expected = [
            (x.view(np.uint32) << 3) ^ (x.view(np.uint32) >> 5),
            (x >> 7) + (x & 255),
            np.where(x > y, x, x | 1) * x,
            np.maximum(x, np.minimum(9, y)),
            x.astype(np.float32).astype(np.float16).view(np.int16),
        ]
    for row, values in enumerate(expected):
        assert np.array_equal(out[8 * row : 8 * row + 8], values.astype(np.int32)), row
    assert np.array_equal(out[40:].view(np.int8), x.astype(np.int8))


def test_reductions_fold_halves() -> None:
    @compiled
    def reduce(x: Array, out: Array, whole: Array) -> None:
        v, n = load_f32x8(address_of(x), 0), load_i32x8(address_of(x), 0)
        out[0], out[1], out[2], out[3] = sum_f32(v), max_f32(v), extract(v, 3), extract(v, 0)
        whole[0], whole[1], whole[2] = sum_i32(n), max_i32(n), extract(n, 7)
        whole[3] = mask_bits(v < splat_f32x8(0.0))

    for seed in range(20):
        x = floats(8, seed=seed)
        out, whole = np.zeros(4, np.float32), np.zeros(4, np.int64)
        reduce(x, out, whole)
        four = x[:4] + x[4:]
        two = four[:2] + four[2:]
        assert list(out) == [two[0] + two[1], x.max(), x[3], x[0]]
        ints = x.view(np.int32)
        total = int(ints.astype(np.int64).sum())
        assert whole[0] == (total + 2**31) % 2**32 - 2**31
        assert list(whole[1:3]) == [ints.max(), ints[7]]
        assert whole[3] == sum(1 << i for i in range(8) if x[i] < 0)


def test_masks_leave_other_memory_alone() -> None:
    @compiled
    def masked(source: Array, target: Array, n: int) -> None:
        v = load_masked_f32x8(address_of(source), 0, lanes_below(n))
        store_f32x8(address_of(target), 0, v)
        store_masked_f32x8(address_of(target), 32, v + splat_f32x8(1.0), lanes_below(n))
        prefetch(address_of(source), 1 << 20)

    source = floats(8)
    for n in range(9):
        target = np.full(16, 5, np.float32)
        masked(source[:8], target, n)
        assert np.array_equal(target[:n], source[:n])
        assert np.all(target[n:8] == 0)
        assert np.array_equal(target[8 : 8 + n], source[:n] + np.float32(1))
        assert np.all(target[8 + n :] == 5)


def test_scalar_memory() -> None:
    @compiled
    def scalars(x: Array, out: Array, single: Array) -> None:
        at = address_of(x)
        out[0], out[1] = scalar_load_i8(at, 1), scalar_load_u8(at, 1)
        out[2], out[3] = scalar_load_i16(at, 1), scalar_load_u16(at, 1)
        out[4] = scalar_load_u32(at, 1) + scalar_load_i8(at, 1)
        scalar_store_i64(address_of(out), 40, -(1 << 40))
        scalar_store_f32(address_of(single), 0, 1.5)
        store_f32x8(address_of(single), 4, broadcast_f32x8(address_of(single), 0))

    x = np.array([1, 0xFE, 0xFF, 0x80, 0x81, 7], np.uint8)
    out, single = np.zeros(6, np.int64), np.zeros(9, np.float32)
    scalars(x, out[:5], single)
    assert list(out) == [-2, 0xFE, -2, 0xFFFE, 0x8180FFFE - 2, -(1 << 40)]
    assert np.all(single == 1.5)


def test_atomics() -> None:
    @compiled
    def count(words: Array) -> Any:
        at = address_of(words)
        before = atomic_add(at, 8, 5)
        store_release(at, 0, load_acquire(at, 8) * 10)
        pause()
        return before

    words = np.array([0, 37], np.int64)
    assert count(words) == 37
    assert list(words) == [420, 42]
