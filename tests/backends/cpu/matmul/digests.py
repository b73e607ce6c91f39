"""Digests of products from fixed inputs; `python -m` prints them for one isa."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np

from localllm.backends.cpu import target
from localllm.backends.cpu.compiler import compile_kernels
from localllm.gguf import TensorType
from tests.backends.cpu.matmul.products import Matrix, extreme_weights, kernels_of, random_weights

KINDS = (
    TensorType.Q3_K,  # six-bit scales that are pairs too
    TensorType.Q8_0,  # whole bytes
    TensorType.IQ4_XS,  # whole bytes from a table, with scales
    TensorType.MXFP4,  # a table, exponents
    TensorType.F16,  # conversion and fused multiply-add
)


def digests(kinds: Sequence[TensorType] = KINDS) -> dict[str, str]:
    found = {}
    for kind in kinds:
        x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
        matrix = Matrix(kind, [random_weights(kind, 37, 512)], 512)
        digest = hashlib.sha256(matrix.packed.tobytes())
        for n in (1, 7, 16):
            digest.update(matrix(x[:n]).tobytes())
        for byte in (0xFF, 0x80, 0):
            extreme = Matrix(kind, [extreme_weights(kind, 8, 512, byte)], 512)
            for n, value in ((2, 3.5), (12, -3.5)):
                digest.update(extreme(np.full((n, 512), value, np.float32)).tobytes())
        found[kind.name] = digest.hexdigest()
    return found


if __name__ == "__main__":
    target.use(sys.argv[1])
    compile_kernels(kernels_of(KINDS), 2, lambda _: None)
    print(json.dumps(digests()))
