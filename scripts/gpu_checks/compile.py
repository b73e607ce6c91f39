"""Compiles what the measurements launch, on several cores and before they start.

Kernels know the sizes of matrices but not the number of layers, so two layers of the shape are
enough: in them all formats of the mix occur. Triton keeps what it has compiled on disk.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_checks.check import Check
from gpu_checks.load import Load, blocks_for
from gpu_checks.random_program import random_model
from gpu_checks.speed import Plan, ignore
from localllm.backends.cuda.backend import CudaBackend

# Numbers of tokens that lead to different kernels, shared out: few and many, odd and round ones.
TOKENS = ((1, 2, 16), (17, 64), (65, 4096))
REHEARSED_TOKENS = ((1,), (2,))


def run(check: Check) -> None:
    plan = Plan(check.rehearsal)
    shape = replace(plan.shape, layers=min(2, plan.shape.layers))
    program, tensors = random_model(shape, plan.limits.context)
    backend = CudaBackend(check.dtype, check.device)
    loaded = backend.load(program, tensors, ignore)
    most = max(plan.batches)
    blocks = max(blocks_for(most, plan.decoded), blocks_for(1, plan.limits.context))
    caches = backend.alloc_kv(program.kv_groups, [blocks])
    step = backend.compile(program, loaded, caches, plan.limits, ignore)
    shares = (REHEARSED_TOKENS if check.rehearsal else TOKENS)[check.shard :: check.shards]
    for tokens in [tokens for share in shares for tokens in share]:
        Load(step, 1, plan.limits.context, shape.vocab).prompt(tokens)
        if tokens <= most:
            Load(step, tokens, plan.decoded, shape.vocab).decode()
        check.put(f"{tokens} tokens", "compiled")
