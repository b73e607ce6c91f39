"""Rotation of queries and keys together with the store of keys and values: one pass of three.

Rotated keys go to the cache straight from the first-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import (
    H_SLOTS,
    H_TOKENS,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels import kv
from localllm.backends.cpu.kernels.rope import rotate_head
from localllm.backends.cpu.simd import scalar_load_i32


@dataclass(frozen=True)
class RopeStoreArgs(kv.StoreArgs):
    """Words of `rope_and_store`: those of `kv_store`, then what `rope` has to know of q.

    `scratch` has 4 * kv_heads * key_dim bytes for each thread.
    """

    q: int
    q_stride: int
    out: int
    out_stride: int
    heads: int
    pairs: int
    interleaved: bool
    table: int  # filled by `rope_table`
    scratch: int
    scratch_bytes: int  # per thread


_Q, _Q_STRIDE, _OUT, _OUT_STRIDE, _HEADS, _PAIRS, _INTERLEAVED, _TABLE, _SCRATCH, _SCRATCH_BYTES = (
    range(kv.AFTER_STORE_ARGS, kv.AFTER_STORE_ARGS + 10)
)


@kernel
def rope_and_store(args: int, tid: int, nthreads: int) -> None:
    """Rotates q into `out` and k on its way to the cache, and stores v."""
    head = header(args)
    tokens, kv_heads = arg_i64(head, H_TOKENS), arg_i64(args, kv.KV_HEADS)
    slots = arg_i64(head, H_SLOTS) + arg_i64(args, kv.GROUP) * tokens * 4
    keys = arg_i64(args, _SCRATCH) + tid * arg_i64(args, _SCRATCH_BYTES)
    chunk = kv.store_claim(tokens)
    first = claim(args, chunk)
    while first < tokens:
        for token in range(first, min(first + chunk, tokens)):
            q = arg_i64(args, _Q) + token * arg_i64(args, _Q_STRIDE) * 4
            out = arg_i64(args, _OUT) + token * arg_i64(args, _OUT_STRIDE) * 4
            _rotate_heads(args, token, q, out, arg_i64(args, _HEADS))
            k = arg_i64(args, kv.K) + token * arg_i64(args, kv.K_STRIDE) * 4
            _rotate_heads(args, token, k, keys, kv_heads)
            slot = scalar_load_i32(slots, token * 4)
            kv.store_heads(
                keys,
                arg_i64(args, kv.V) + token * arg_i64(args, kv.V_STRIDE) * 4,
                arg_i64(args, kv.CACHE) + slot // BLOCK_TOKENS * arg_i64(args, kv.BLOCK_BYTES),
                slot % BLOCK_TOKENS,
                arg_i64(args, kv.HEAD_BYTES),
                kv_heads,
                arg_i64(args, kv.KEY_DIM),
                arg_i64(args, kv.VALUE_DIM),
            )
        first = claim(args, chunk)


@helper
def _rotate_heads(args: int, token: int, x: int, out: int, heads: int) -> None:
    pairs, head_dim = arg_i64(args, _PAIRS), arg_i64(args, kv.KEY_DIM)
    table = arg_i64(args, _TABLE) + token * pairs * 16
    for at in range(0, heads * head_dim * 4, head_dim * 4):
        rotate_head(x + at, out + at, table, pairs, head_dim, arg_i64(args, _INTERLEAVED))
