"""What threads need to share work: atomic access to aligned int64 words, and a pause."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from llvmlite import binding as llvm
from numba import types

from localllm.backends.cpu.simd.vector import I32, I64, call, intrinsic, pointer


@intrinsic
def atomic_add(typingctx: Any, address: Any, offset: Any, value: Any) -> Any:
    """Adds to an int64 and returns what it was before."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        amount = context.cast(b, args[2], sig.args[2], types.int64)
        return b.atomic_rmw("add", pointer(context, b, sig, args, I64), amount, "seq_cst")

    return types.int64(address, offset, value), build


@intrinsic
def load_acquire(typingctx: Any, address: Any, offset: Any) -> Any:
    """Reads an int64; what its writer wrote before `store_release` is visible after it."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(pointer(context, b, sig, args, I64), "acquire", 8, typ=I64)

    return types.int64(address, offset), build


@intrinsic
def store_release(typingctx: Any, address: Any, offset: Any, value: Any) -> Any:
    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        word = context.cast(b, args[2], sig.args[2], types.int64)
        b.store_atomic(word, pointer(context, b, sig, args, I64), "release", 8)
        return context.get_dummy_value()

    return types.void(address, offset, value), build


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def build(context: Any, b: Any, sig: Any, args: Any) -> Any:
        triple = llvm.get_process_triple()
        if triple.startswith(("x86_64", "amd64")):
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif triple.startswith(("aarch64", "arm64")):
            call(b, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])  # yield
        return context.get_dummy_value()

    return types.void(), build
