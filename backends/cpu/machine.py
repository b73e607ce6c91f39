"""What the machine can do at best: small kernels that only read, or only multiply.

They are the floor beside which `profile` shows a step's operations. Several threads run them
together, as they run a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from localllm.backends.cpu import target
from localllm.backends.cpu.kernel import (
    H_THREADS,
    H_TOKENS,
    HEADER_WORDS,
    Kernel,
    arg_i64,
    claim,
    kernel,
    kernel_factory,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.matmul.dots import dots
from localllm.backends.cpu.matmul.emit import Emitter, Value, routine
from localllm.backends.cpu.memory import aligned_bytes
from localllm.backends.cpu.simd import (
    Vector,
    load_i32x8,
    prefetch,
    splat_i32x8,
    store_i32x8,
)
from localllm.backends.cpu.tape import SYNC_BYTES
from localllm.backends.cpu.workers import Workers

_READ_BYTES = 512 << 20  # more than caches hold
_PIECE = 1 << 20
_AHEAD = 4096  # bytes; hardware alone does not fetch across pages
_OUT_BYTES = 64  # per thread: what was computed has to be used
_ROUNDS = 20_000  # of a multiplying loop, per claim
_CLAIMS_PER_THREAD = 16
_TRIES = 5

# One round of `_int8_rounds`: this many weight vectors meet as many activations, in each of
# the groups of four k that 4-bit weights may add up in 16 bits.
_WEIGHTS, _COLUMNS, _GROUPS = 2, 4, 8
_CHAINS = 12  # of `_f32_rounds`: enough to hide an addition's latency
_WINDOW = 4096  # bytes that the multiplying loops read, over and over


@dataclass(frozen=True)
class Machine:
    """Bytes read from memory, and products added up, per second by all threads together."""

    read_bytes: float
    int8_products: float
    f32_products: float


@dataclass(frozen=True)
class _Words(Arguments):
    data: int
    amount: int  # bytes to read, or claims to multiply
    out: int


_DATA, _AMOUNT, _OUT = range(FIRST_WORD, FIRST_WORD + 3)


def measure_machine(threads: int) -> Machine:
    """The best of a few tries of each. Takes about a second, and half a GiB for the time."""
    workers = Workers(threads)
    try:
        return _measure(workers)
    finally:
        workers.close()


def _measure(workers: Workers) -> Machine:
    memory = aligned_bytes(_READ_BYTES, huge_pages=True)
    memory.fill(1)
    out = aligned_bytes(_OUT_BYTES * workers.threads)
    claims = _CLAIMS_PER_THREAD * workers.threads

    def best(code: Kernel, amount: int) -> float:
        words = _Words(int(memory.ctypes.data), amount, int(out.ctypes.data))
        return min(seconds(workers, code, words) for _ in range(_TRIES))

    lanes = _int8_vector().n
    int8 = claims * _ROUNDS * _WEIGHTS * _COLUMNS * _GROUPS * lanes
    f32 = claims * _ROUNDS * _CHAINS * 8
    return Machine(
        read_bytes=_READ_BYTES / best(read_memory, _READ_BYTES),
        int8_products=int8 / best(multiply("int8"), claims),
        f32_products=f32 / best(multiply("f32"), claims),
    )


def seconds(workers: Workers, code: Kernel, words: Arguments, tokens: int = 1) -> float:
    """How long all threads take for one call of a kernel with these words."""
    header = np.zeros(HEADER_WORDS, np.int64)
    header[H_TOKENS], header[H_THREADS] = tokens, workers.threads
    sync = aligned_bytes(SYNC_BYTES)
    block = np.array([header.ctypes.data, sync.ctypes.data, *words.words()], np.int64)
    table = np.array([[code.address, block.ctypes.data, -1, 0]], np.int64)
    began = time.perf_counter()
    workers.start(table, sync, 0, 1, tokens)
    workers.join()
    taken = time.perf_counter() - began
    workers.settle()
    return taken


@kernel
def read_memory(args: int, tid: int, n: int) -> None:
    """Loads every byte once."""
    data, size = arg_i64(args, _DATA), arg_i64(args, _AMOUNT)
    a, b = splat_i32x8(0), splat_i32x8(0)
    at = claim(args, _PIECE)
    while at < size:
        for line in range(at, at + _PIECE, 128):
            prefetch(data, line + _AHEAD)
            prefetch(data, line + _AHEAD + 64)
            a += load_i32x8(data, line) + load_i32x8(data, line + 32)
            b += load_i32x8(data, line + 64) + load_i32x8(data, line + 96)
        at = claim(args, _PIECE)
    store_i32x8(arg_i64(args, _OUT), tid * _OUT_BYTES, a + b)


@kernel_factory
def multiply(kind: str) -> Kernel:
    """Multiplies numbers that lie in the first-level cache, as fast as `kind` can be."""
    rounds = routine(3, _WRITERS[kind])

    @kernel
    def run(args: int, tid: int, n: int) -> None:
        out = arg_i64(args, _OUT) + tid * _OUT_BYTES
        while claim(args, 1) < arg_i64(args, _AMOUNT):
            rounds(arg_i64(args, _DATA), _ROUNDS, out)

    return run


def _int8_vector() -> Vector:
    """As wide as the instruction set's tiles of many columns."""
    return Vector("i8", 64 if target.current() == "avx512" else 32)


def _int8_rounds(e: Emitter, data: Value, count: Value, out: Value) -> None:
    """The way of the matmuls' tiles, without unpacking weights and without scales."""
    kind, way = _int8_vector(), dots()
    zero = e.splat(Vector("i32", kind.n // 4), 0)
    totals = [e.variable(zero) for _ in range(_WEIGHTS * _COLUMNS)]
    with e.loop(count) as index:
        at = data + ((index << 7) & (_WINDOW // 2 - 1))  # else the loop would be moved out of
        chains: list[Value | None] = [None] * len(totals)
        for group in range(_GROUPS):
            weights = [e.load(kind, at, (group * _WEIGHTS + w) * kind.n) for w in range(_WEIGHTS)]
            for c in range(_COLUMNS):
                column = e.broadcast(kind, at, 4 * (group + _GROUPS * c))
                for w in range(_WEIGHTS):
                    at_chain = c * _WEIGHTS + w
                    chains[at_chain] = way.add(e, chains[at_chain], weights[w], column)
        for total, chain in zip(totals, chains, strict=True):
            assert chain is not None
            total.set(way.flush(e, total.get(), chain, 1))
    _store_sum(e, [total.get() for total in totals], out)


def _f32_rounds(e: Emitter, data: Value, count: Value, out: Value) -> None:
    """Fused multiply-adds of eight lanes, which is how attention multiplies."""
    kind = Vector("f32", 8)
    chains = [e.variable(e.splat(kind, 0.0)) for _ in range(_CHAINS)]
    x, y = e.load(kind, data), e.load(kind, data, 32)
    with e.loop(count):
        for chain in chains:
            chain.set(e.fma(x, y, chain.get()))
    _store_sum(e, [chain.get() for chain in chains], out)


def _store_sum(e: Emitter, values: list[Value], out: Value) -> None:
    total = values[0]
    for value in values[1:]:
        total = total + value
    e.store(total, out)


_WRITERS: dict[str, Callable[..., None]] = {"int8": _int8_rounds, "f32": _f32_rounds}
