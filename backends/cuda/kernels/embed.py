"""Gathers rows of a weight by token id."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.cuda.kernels.dequantize import weights_chunk
from localllm.backends.cuda.kernels.layout import CHUNK, PackedWeight

_TOKENS = 16


@triton.jit(do_not_specialize=["n_ids"])
def _embed_kernel(
    ids, codes, high, scales, supers, out, n_ids, n_rows, cols, out_stride,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = token < n_ids
    rows = tl.load(ids + token, mask=valid, other=0)
    w = weights_chunk(codes, high, scales, supers, rows, n_rows, cols, chunk, FORMAT, TOKENS)
    k = chunk * 128 + tl.arange(0, 128)
    at = token.to(tl.int64)[:, None] * out_stride + k[None, :]
    tl.store(out + at, w.to(out.dtype.element_ty), mask=valid[:, None] & (k < cols)[None, :])


def embed(ids: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """out[t] = weight[ids[t]]; ids int32, all below the weight's rows."""
    if len(ids) == 0:
        return
    _embed_kernel[(-(-len(ids) // _TOKENS), -(-weight.cols // CHUNK))](
        ids, weight.codes, weight.high, weight.scales, weight.supers, out,
        len(ids), weight.rows, weight.cols, out.stride(0),
        FORMAT=weight.type.name, TOKENS=_TOKENS, enable_fp_fusion=False,
    )  # fmt: skip
