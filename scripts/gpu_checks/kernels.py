"""Every kernel against the reference, on random blocks: products of all formats here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_checks import attention_check, other_kernels
from gpu_checks.check import Check, Json, holds, identical
from localllm.backends.cuda.kernels.embed import embed
from localllm.backends.cuda.kernels.layout import PLAIN, QUANTIZED, PackedWeight, pack
from localllm.backends.cuda.kernels.matmul import matmul
from localllm.backends.torch_common.dequantize import DEQUANTIZERS
from localllm.gguf import TensorType
from localllm.gguf.blocks import block_size, type_size

ROWS, COLS = 200, 2304  # neither whole tiles of rows nor whole pairs of chunks; several splits
COLUMNS = (1, 16, 18, 70, 200)  # every shape of tile
REHEARSED_ROWS, REHEARSED_COLS, REHEARSED_COLUMNS = 66, 512, (1, 18)
REHEARSED = (TensorType.Q4_K, TensorType.MXFP4, TensorType.BF16)

# Of the largest output. Both sides round weights and inputs alike, so only sums differ, and
# a weight in a few thousand whose rounding to 16 bits turns on the last bit of its 32.
PRODUCT_ERROR = 2e-4
EXACT_ERROR = 2e-6

# Where a block's float16 scales lie; all its other bytes may be anything.
_SCALES: dict[TensorType, tuple[int, ...]] = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ4_XS: (0,),
}


def run(check: Check) -> None:
    work: dict[str, Callable[[Check], Json]] = {}
    for kind in REHEARSED if check.rehearsal else sorted({*QUANTIZED, *PLAIN}):
        work[kind.name] = partial(products, kind=kind)
    work |= attention_check.CASES | other_kernels.CASES
    for number, (name, case) in enumerate(work.items()):
        if number % check.shards == check.shard:
            check.put(name, case(check) if check.left() > 0 else "left out: no time")


def products(check: Check, kind: TensorType) -> Json:
    """The format's rows as floats, and its products with few and with many columns."""
    rng = np.random.default_rng(int(kind))
    rows, cols = (REHEARSED_ROWS, REHEARSED_COLS) if check.rehearsal else (ROWS, COLS)
    weight, values = random_weight(kind, rows, cols, rng, check.device)
    ids = torch.arange(rows, dtype=torch.int32, device=check.device)
    gathered = torch.empty(rows, cols, device=check.device)
    embed(ids, weight, gathered)
    found: dict[str, Json] = {"rows": holds(error(gathered, values), EXACT_ERROR)}

    dtype = PLAIN.get(kind, getattr(torch, check.dtype))
    dtype = torch.float32 if check.rehearsal else dtype
    columns = REHEARSED_COLUMNS if check.rehearsal else COLUMNS
    x = torch.from_numpy(rng.standard_normal((max(columns), cols), np.float32)).to(dtype)
    expected = x.double() @ values.to(dtype).double().T
    outs = []
    for count in columns:
        out = torch.full((count, rows), torch.nan, device=check.device)
        matmul(x[:count].to(check.device), weight, out)
        outs.append(out.cpu())
        found[f"{count} columns"] = holds(error(out, expected[:count]), PRODUCT_ERROR)
    alike = all(torch.equal(out[0], outs[0][0]) for out in outs)
    found["the first column alone and in company"] = identical(alike)
    return found


def random_weight(
    kind: TensorType, rows: int, cols: int, rng: np.random.Generator, device: str
) -> tuple[PackedWeight, Tensor]:
    """On the device, and its values in float32 on the CPU."""
    if kind in PLAIN:
        values = torch.from_numpy(rng.standard_normal((rows, cols), np.float32)).to(PLAIN[kind])
        return pack(kind, values.view(torch.uint8).to(device), rows, cols), values.float()
    raw = torch.from_numpy(random_blocks(kind, rows * cols, rng))
    packed = pack(kind, raw.reshape(rows, -1).to(device), rows, cols)
    return packed, DEQUANTIZERS[kind](raw).reshape(rows, cols)


def random_blocks(
    kind: TensorType, elements: int, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """[blocks, block bytes] of random bytes with scales that are finite."""
    n = elements // block_size(kind)
    blocks = rng.integers(0, 256, (n, type_size(kind)), np.uint8)
    for at in _SCALES.get(kind, ()):
        scales = rng.uniform(-0.01, 0.01, n).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(n, 2)
    if kind == TensorType.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, n)  # an exponent
    return blocks


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest value."""
    difference = (actual.cpu().double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max())
