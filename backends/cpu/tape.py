"""A step as a table of kernel calls, and the native code with which threads walk it.

Every thread walks the whole table by itself. There is no barrier: each op has a gate that counts
who went in and who came out. A thread inside an op claims chunks until none is left, so the op is
finished once someone has come out and nobody is inside; from then on the gate lets nobody in. An
op waits only for the ops that its data depends on, and a thread that lost its core for a while
skips what the others finished meanwhile.

Waiting is a short spin, then giving the core away: beside another busy process, spinning on would
keep the very thread that is waited for from running.
"""

from __future__ import annotations

import sys
from typing import Any

import llvmlite.ir as ir
from numba import types

from localllm.backends.cpu.kernel import CACHE_LINE, arg_i64, call_kernel, helper, native
from localllm.backends.cpu.simd import atomic_add, intrinsic, load_acquire, pause, store_release
from localllm.backends.cpu.simd.vector import I32, I64, call, pointer

# A row of the table: address of the code; address of the arguments; the last op that has to be
# finished before (-1: none; all ops up to that one are then finished); and the most tokens in a
# step for which one thread does the op alone, since sharing it would take longer.
ROW_WORDS = 4

# An op's claim counter and its gate, each in its own cache line.
SYNC_BYTES = 2 * CACHE_LINE
_GATE = CACHE_LINE

# Words of the control block, which tells the threads what to run.
C_TABLE, C_SYNC, C_FIRST, C_END, C_THREADS, C_WAKE_FDS, C_STAMPS, C_TOKENS = range(8)
C_BUSY = 8  # threads other than the caller's that may still be walking; its own cache line
CONTROL_WORDS = 16

_OUT = 1 << 32  # the gate's word: threads that went in + _OUT * threads that came out
_SPINS = 400
_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


@intrinsic
def _compare_exchange(typingctx: Any, address: Any, expected: Any, new: Any) -> Any:
    """Stores `new` at the address if it holds `expected`; whether it did."""

    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        word = b.inttoptr(values[0], I64.as_pointer())
        result = b.cmpxchg(word, values[1], values[2], "acq_rel", "acquire")
        return b.extract_value(result, 1)

    return types.boolean(types.intp, types.int64, types.int64), build


@intrinsic
def _yield_core(typingctx: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        return call(b, _YIELD, I32, [])

    return types.int32(), build


@intrinsic
def _read_byte(typingctx: Any, fd: Any) -> Any:
    """Blocks until the pipe holds a byte and takes it: 1; or 0 at its end, -1 when disturbed."""

    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        byte = b.alloca(ir.IntType(8))
        return call(b, "read", I64, [b.trunc(values[0], I32), byte, ir.Constant(I64, 1)])

    return types.int64(types.int64), build


@intrinsic
def _write_byte(typingctx: Any, fd: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        byte = b.alloca(ir.IntType(8))
        b.store(ir.Constant(ir.IntType(8), 1), byte)
        return call(b, "write", I64, [b.trunc(values[0], I32), byte, ir.Constant(I64, 1)])

    return types.int64(types.int64), build


@intrinsic
def _nanoseconds(typingctx: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        spec = b.alloca(ir.ArrayType(I64, 2))
        call(b, "clock_gettime", I32, [ir.Constant(I32, _CLOCK_MONOTONIC), spec])
        seconds, nanos = (b.extract_value(b.load(spec, typ=spec.type.pointee), i) for i in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(I64, 10**9)), nanos)

    return types.int64(), build


@intrinsic
def _store_word(typingctx: Any, address: Any, offset: Any, value: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, values: Any) -> Any:
        b.store(values[2], pointer(context, b, sig, values, I64))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), build


@helper
def _finished(gate: int) -> bool:
    word = load_acquire(gate, 0)
    return word >= _OUT and (word & (_OUT - 1)) == word >> 32


@helper
def _enter(gate: int, alone: bool) -> bool:
    """Goes into the op, unless it is finished, or one does it alone."""
    if alone:
        return load_acquire(gate, 0) == 0 and _compare_exchange(gate, 0, 1)
    while not _finished(gate):
        word = load_acquire(gate, 0)
        inside = (word & (_OUT - 1)) - (word >> 32)
        if (word < _OUT or inside > 0) and _compare_exchange(gate, word, word + 1):
            return True
    return False


@helper
def _wait_until_finished(gate: int) -> None:
    spins = 0
    while not _finished(gate):
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _yield_core()


@helper
def _walk(control: int, tid: int) -> None:
    table = arg_i64(control, C_TABLE)
    sync = arg_i64(control, C_SYNC)
    n = arg_i64(control, C_THREADS)
    stamps = arg_i64(control, C_STAMPS)
    tokens = arg_i64(control, C_TOKENS)
    first = arg_i64(control, C_FIRST)
    done = first - 1  # all ops up to this one are known to be finished
    for op in range(first, arg_i64(control, C_END)):
        row = table + op * (8 * ROW_WORDS)
        gate = sync + op * SYNC_BYTES + _GATE
        if not _finished(gate):
            needed = arg_i64(row, 2)
            while done < needed:
                done += 1
                _wait_until_finished(sync + done * SYNC_BYTES + _GATE)
            if _enter(gate, tokens <= arg_i64(row, 3)):
                call_kernel(arg_i64(row, 0), arg_i64(row, 1), tid, n)
                atomic_add(gate, 0, _OUT)
                if stamps != 0 and _finished(gate):
                    _store_word(stamps, op * 8, _nanoseconds())
    while done < arg_i64(control, C_END) - 1:
        done += 1
        _wait_until_finished(sync + done * SYNC_BYTES + _GATE)


@native(types.void(types.intp, types.int64, types.int64))
def serve(control: int, tid: int, wake_fd: int) -> None:
    """A worker thread's life: sleeps on its pipe, walks the table, until the pipe is closed."""
    while True:
        got = _read_byte(wake_fd)
        if got == 0:
            return
        if got == 1:
            _walk(control, tid)
            atomic_add(control, C_BUSY * 8, -1)


@helper
def _wait_for_stragglers(control: int) -> None:
    spins = 0
    while load_acquire(control, C_BUSY * 8) > 0:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _yield_core()


@native(types.void(types.intp))
def settle(control: int) -> None:
    """Returns once no worker reads the control block or a table any more."""
    _wait_for_stragglers(control)


@native(types.void(types.intp))
def start(control: int) -> None:
    """Resets the gates and counters of the ops to run and wakes the workers."""
    sync = arg_i64(control, C_SYNC)
    for op in range(arg_i64(control, C_FIRST), arg_i64(control, C_END)):
        _store_word(sync, op * SYNC_BYTES, 0)
        _store_word(sync, op * SYNC_BYTES + _GATE, 0)
    others = arg_i64(control, C_THREADS) - 1
    fds = arg_i64(control, C_WAKE_FDS)
    store_release(control, C_BUSY * 8, others)
    for worker in range(others):
        _write_byte(arg_i64(fds, worker))


@native(types.void(types.intp))
def join(control: int) -> None:
    """Works as thread 0 and returns when every op is finished."""
    _walk(control, 0)


NATIVES = (serve, settle, start, join)
