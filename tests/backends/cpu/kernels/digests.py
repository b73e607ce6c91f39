"""Digests of what the kernels compute from fixed inputs; `python -m` prints them for one isa."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.backends.cpu import target
from tests.backends.cpu.kernels.paged import Paged, Shape
from tests.backends.cpu.kernels.test_moe_routing import random_logits, routed
from tests.backends.cpu.kernels.test_sampling import Choice, draw


def digests() -> dict[str, str]:
    found = {}
    for shape in (
        Shape(heads=9, kv_heads=3, key_dim=64, value_dim=64),
        Shape(heads=7, kv_heads=1, key_dim=20, value_dim=36, window=50, softcap=4.0),
    ):
        paged = Paged(shape, [300, 20])
        paged.k[0][7] *= 1e6  # beyond float16
        paged.k[0][9] *= 1e-6  # subnormal
        found[f"attention {shape}"] = _digest(*paged.attend([(0, 0, 300), (1, 0, 20)]))
    logits = np.random.default_rng(0).standard_normal((60, 301)).astype(np.float32) * 4
    rows = [Choice(index=i, top_p=0.9, min_p=0.01 * (i % 2), top_k=i) for i in range(60)]
    found["sampling"] = _digest(np.array(draw(logits, rows)))
    found["routing"] = _digest(*vars(routed(random_logits(20, 16), 4)).values())
    return found


def _digest(*arrays: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    target.use(sys.argv[1])
    print(json.dumps(digests()))
