"""Digests of products as isa dotprod computes them, on any machine; `python -m` prints them.

The instructions that only Arm has are replaced by plain ones while kernels are built. What is
left is what differs from x86: signed weights, tables in parts, other tiles.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import llvmlite.ir as ir

from localllm.backends.cpu import cache, target
from localllm.backends.cpu.simd import dot, lookup, vector
from localllm.gguf import TensorType
from tests.backends.cpu.matmul.digests import digests

KINDS = (TensorType.Q8_0, TensorType.IQ4_XS)

_I16X16 = ir.VectorType(vector.ELEMENTS["i16"], 16)
_I32X8 = ir.VectorType(vector.I32, 8)


def _call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    if name == "llvm.aarch64.neon.tbl1.v16i8":
        table, index = args
        return lookup.select16(b, table.constant, index)
    assert name == "llvm.aarch64.neon.sdot.v4i32.v16i8"
    total, x, y = args
    products = b.mul(b.sext(x, _I16X16), b.sext(y, _I16X16))
    # Two of them fit 16 bits, since activations are no less than -127.
    pairs = b.sext(dot.add_pairs(b, products), _I32X8)
    return b.add(total, dot.add_pairs(b, pairs))


if __name__ == "__main__":
    cache.use_directory(cache.open_directory("dotprod-emulated"))
    with (
        patch.object(target, "_current", "dotprod"),
        patch.object(dot, "call", _call),
        patch.object(lookup, "call", _call),
    ):
        print(json.dumps(digests(KINDS)))
