"""Compiles every kernel for the GPU named on the command line, without one; run as a script.

The launchers are called as usual, with CPU tensors. Where Triton would launch, it compiles only.
Prints a line of JSON per compiled kernel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from localllm.backends.base import SamplingArrays, StepLimits
from localllm.backends.cuda.backend import CudaBackend
from localllm.backends.cuda.kernels.attention import AttentionShape, attend
from localllm.backends.cuda.kernels.elementwise import act_mul, add
from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import PLAIN, QUANTIZED, pack
from localllm.backends.cuda.kernels.matmul import matmul, tiles_for
from localllm.backends.cuda.kernels.moe import combine, group_pairs, route
from localllm.backends.cuda.kernels.norm import norm
from localllm.backends.cuda.kernels.paged import PagedCache
from localllm.backends.cuda.kernels.rope import Angles, rope, rope_and_store, store
from localllm.backends.cuda.kernels.sampling import DeviceSampling, sample
from localllm.gguf import TensorType
from localllm.gguf.blocks import row_bytes
from tests.backends.cpu.programs import PROGRAMS, random_tensors

BF16 = torch.bfloat16
FOR_DECODE = {TensorType.Q8_0, TensorType.Q3_K, TensorType.IQ4_XS, TensorType.F16}
FOR_PREFILL = {TensorType.Q4_K, TensorType.BF16, TensorType.F32}


class OfflineDriver:
    """Enough of a driver to compile: the target, and no device."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_only(capability: int) -> None:
    driver.set_active(OfflineDriver(capability))
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        ptx = kernel.asm["ptx"]
        report = {
            "name": kernel.metadata.name,
            "format": kwargs.get("FORMAT"),
            "shared": kernel.metadata.shared,
            "tensor_core": "wgmma.mma_async" in ptx or "mma.sync" in ptx,
            "cubin": len(kernel.asm["cubin"]),
        }
        print(json.dumps(report), flush=True)

    JITFunction.run = compile_it


def compile_matmuls() -> None:
    for tensor_type in sorted({*QUANTIZED, *PLAIN}):
        rows, cols = 128, 2048
        raw = torch.zeros(rows, row_bytes(tensor_type, cols), dtype=torch.uint8)
        weight = pack(tensor_type, raw, rows, cols)
        dtype = PLAIN.get(tensor_type, BF16)
        if tensor_type in FOR_DECODE:
            x = torch.zeros(1, cols, dtype=dtype)
            matmul(x, weight, torch.zeros(1, rows))
            matmul(x, weight, torch.zeros(1, rows // 2, dtype=dtype), act="silu")
        if tensor_type in FOR_PREFILL:
            x = torch.zeros(300, cols, dtype=dtype)
            bias, out = torch.zeros(rows), torch.zeros(300, rows)
            matmul(x, weight, out, bias=bias, residual=out)
            if tensor_type == TensorType.Q4_K:
                few = replace(tiles_for(1), side_by_side=False)  # as of a weight with many rows
                for count, tiles in ((1, few), (300, tiles_for(300))):
                    gated = torch.zeros(count, rows // 2, dtype=dtype)
                    matmul(x[:count], weight, gated, act="silu", tiles=tiles)
        embed(torch.zeros(1, dtype=torch.int32), weight, torch.zeros(1, cols))


def compile_attention() -> None:
    positions, tiles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    angles = Angles(torch.zeros(9, 64), torch.zeros(9, 64), interleaved=False)
    for dtype, dim, splits in ((BF16, 128, (0, 4)), (torch.int8, 128, (0,)), (BF16, 256, (0,))):
        cache = PagedCache.empty(1, 2, dim, dim, dtype)
        q, kv = torch.zeros(1, 8 * dim, dtype=BF16), torch.zeros(1, 2 * dim, dtype=BF16)
        rope_and_store(q, kv, kv, q, cache, positions, slots, angles)
        for split in splits:
            shape = AttentionShape(8, 0.1, window=99, softcap=30.0)
            attend(
                shape, q, cache, q, block_table=table, positions=positions, tiles=tiles,
                sinks=torch.zeros(8), side_by_side=split,
            )  # fmt: skip
    rope(q, q, positions, angles, 256)
    store(kv, kv, cache, slots)


def compile_sampling() -> None:
    arrays = SamplingArrays.greedy(2)
    arrays.bias_ids, arrays.bias_values = np.zeros(1, np.int32), np.zeros(1, np.float32)
    arrays.history_ids, arrays.history_counts = np.zeros(1, np.int32), np.zeros(1, np.int32)
    arrays.mask_rows[0], arrays.masks = 0, np.zeros(2, np.uint32)
    arrays.temperature[:] = 1
    sample(torch.zeros(2, 64), DeviceSampling.from_host(arrays, "cpu"))


def compile_others() -> None:
    x = torch.zeros(2, 64, dtype=BF16)
    norm(x, x[0], x[0], x, eps=1e-5, kind="layer", group=64, residual=x, sum_out=x)
    for act in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        act_mul(x, x, x, act)
    add(x, x, x)
    raw = torch.zeros(4 * 64, row_bytes(TensorType.Q4_0, 64), dtype=torch.uint8)
    experts = pack(TensorType.Q4_0, raw, 64, 64, 4)
    logits = torch.zeros(2, 4)
    weights, chosen = route(logits, 2, gating="softmax", normalize=True, scale=1.0)
    grouping = group_pairs(torch.zeros_like(chosen), 4, 2, tiles_for(1))
    pairs = torch.zeros(4, 64)
    matmul(x, experts, pairs, grouping=grouping, tiles=tiles_for(1))
    combine(pairs, weights, x)


def compile_steps() -> None:
    """Whole steps, as the backend launches them."""
    program = PROGRAMS["dense"]()
    tensors = random_tensors(program, lambda _: TensorType.Q8_0)
    backend = CudaBackend("bfloat16", "cpu")
    weights = backend.load(program, tensors, print_to_stderr)
    caches = backend.alloc_kv(program.kv_groups, [1] * len(program.kv_groups))
    limits = StepLimits(tokens=4, seqs=2, logit_rows=4, context=600)
    backend.compile(program, weights, caches, limits, print_to_stderr).fill()


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    compile_only(int(sys.argv[1]))
    compile_matmuls()
    compile_attention()
    compile_others()
    compile_sampling()
    compile_steps()
