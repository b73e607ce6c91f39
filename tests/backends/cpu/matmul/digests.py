"""Digests of products from fixed inputs; `python -m` prints them for one isa."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from localllm.backends.cpu import target
from localllm.gguf import TensorType
from tests.backends.cpu.matmul.products import Matrix, random_weights

# Scales and pairs; planes of nibbles or bytes, offset; conversion and fused multiply-add.
KINDS = (TensorType.Q6_K, TensorType.Q8_0, TensorType.F16)


def digests() -> dict[str, str]:
    found = {}
    for kind in KINDS:
        x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
        matrix = Matrix(kind, [random_weights(kind, 37, 512)], 512)
        digest = hashlib.sha256(matrix.packed.tobytes())
        for n in (1, 7, 16):
            digest.update(matrix(x[:n]).tobytes())
        found[kind.name] = digest.hexdigest()
    return found


if __name__ == "__main__":
    target.use(sys.argv[1])
    print(json.dumps(digests()))
