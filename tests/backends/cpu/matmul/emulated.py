"""Digests of products as NEON computes them, on any machine; `python -m` prints them.

The instructions that only Arm has are replaced by plain ones while kernels are built. What is
left is what differs from x86: signed weights, tables in parts, other tiles.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import llvmlite.ir as ir

from localllm.backends.cpu import cache, target
from localllm.backends.cpu.simd import dot, lookup, vector
from localllm.gguf import TensorType
from tests.backends.cpu.matmul.digests import digests

KINDS = (TensorType.Q8_0, TensorType.IQ4_XS, TensorType.Q3_K, TensorType.F16)

_NEON = "llvm.aarch64.neon."
_I32X16 = ir.VectorType(vector.I32, 16)


def _call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    if name == f"{_NEON}tbl1.v16i8":
        table, index = args
        return lookup.select16(b, table.constant, index)
    total, x, y = args
    widen = {f"{_NEON}usdot.v4i32.v16i8": b.zext, f"{_NEON}sdot.v4i32.v16i8": b.sext}[name]
    products = b.mul(widen(x, _I32X16), b.sext(y, _I32X16))
    return b.add(total, dot.add_pairs(b, dot.add_pairs(b, products)))


if __name__ == "__main__":
    (isa,) = sys.argv[1:]
    cache.use_directory(cache.open_directory(f"{isa}-emulated"))
    with (
        patch.object(target, "_current", isa),
        patch.object(dot, "call", _call),
        patch.object(lookup, "call", _call),
    ):
        print(json.dumps(digests(KINDS)))
