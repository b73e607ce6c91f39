"""Sampling on the device, by the rules that `SamplingArrays` states: only token ids leave it.

Triton adjusts logits and draws the random numbers, torch orders and sums. Shapes follow from the
batch alone and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.backends.base import SamplingArrays

NO_TOKEN = -1
_BLOCK = 1024


@dataclass(frozen=True)
class DeviceSampling:
    """`SamplingArrays` on a device; unsigned words keep their bits in signed ones."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    choice: Tensor
    index: Tensor
    bias_start: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    history_start: Tensor
    history_ids: Tensor
    history_counts: Tensor
    mask_rows: Tensor
    masks: Tensor
    # What the host knows beforehand, so that a launch is left out.
    biased: bool
    penalized: bool
    masked: bool
    drawn: bool  # some row has a temperature
    head: int  # no drawn row looks further in its order; 0: some looks at all tokens

    @classmethod
    def from_host(cls, arrays: SamplingArrays, device: torch.device | str) -> Self:
        tensors: dict[str, Any] = {
            name: _tensor(array).to(device) for name, array in vars(arrays).items()
        }
        return cls(**tensors, **cls.known(arrays))

    @staticmethod
    def known(arrays: SamplingArrays) -> dict[str, Any]:
        """The fields that are no arrays."""
        drawn = arrays.top_k[arrays.temperature != 0]
        return {
            "biased": len(arrays.bias_ids) > 0,
            "penalized": len(arrays.history_ids) > 0,
            "masked": len(arrays.masks) > 0 and bool((arrays.mask_rows >= 0).any()),
            "drawn": len(drawn) > 0,
            "head": int(drawn.max()) if len(drawn) and drawn.all() else 0,
        }


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    signed = {np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}.get(array.dtype)
    return torch.from_numpy(np.ascontiguousarray(array if signed is None else array.view(signed)))


@triton.jit
def _bias_kernel(z, start, ids, values, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(start + row), tl.load(start + row + 1)
    for base in range(first, last, BLOCK):
        i = base + tl.arange(0, BLOCK)
        inside = i < last
        at = z + row * vocab + tl.load(ids + i, mask=inside, other=0)
        value = tl.load(values + i, mask=inside, other=0.0)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def _penalty_kernel(
    z, start, ids, counts, repetition, presence, frequency, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(start + row), tl.load(start + row + 1)
    factor = tl.load(repetition + row)
    once, each = tl.load(presence + row), tl.load(frequency + row)
    for base in range(first, last, BLOCK):
        i = base + tl.arange(0, BLOCK)
        inside = i < last
        at = z + row * vocab + tl.load(ids + i, mask=inside, other=0)
        count = tl.load(counts + i, mask=inside, other=0)
        value = tl.load(at, mask=inside, other=0.0)
        value = tl.where(value > 0, value / factor, value * factor)
        value -= tl.where(count > 0, once + each * count.to(tl.float32), 0.0)
        tl.store(at, value, mask=inside)


@triton.jit
def _mask_kernel(z, mask_rows, masks, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    if mask_row < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + mask_row * tl.cdiv(vocab, 32) + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(z + row * vocab + token, float("-inf"), mask=inside & forbidden)


@triton.jit
def _uniform_kernel(seed, choice, index, out):
    row = tl.program_id(0)
    zero = tl.full((1,), 0, tl.uint32)
    counter = tl.load(index + row).to(tl.uint32, bitcast=True) + zero
    stream = tl.load(choice + row).to(tl.uint32, bitcast=True) + zero
    word, _, _, _ = tl.philox(tl.load(seed + row), counter, stream, zero, zero)
    u = (word >> 8).to(tl.float32) * (1.0 / (1 << 24))
    tl.store(out + row + tl.arange(0, 1), u)


def uniform(sampling: DeviceSampling) -> Tensor:
    """Each row's number in [0, 1), float32: exact multiples of 2 ** -24."""
    rows = len(sampling.seed)
    out = torch.empty(rows, dtype=torch.float32, device=sampling.seed.device)
    _uniform_kernel[(rows,)](
        sampling.seed, sampling.choice, sampling.index, out, num_warps=1, enable_fp_fusion=False
    )
    return out


def adjusted(logits: Tensor, sampling: DeviceSampling) -> Tensor:
    """A copy of the logits [R, vocab] after bias, penalties and mask, float32."""
    z = logits.to(torch.float32, copy=True).contiguous()
    rows, vocab = z.shape
    s = sampling
    fixed: dict[str, Any] = {"BLOCK": _BLOCK, "enable_fp_fusion": False}
    if s.biased:
        _bias_kernel[(rows,)](z, s.bias_start, s.bias_ids, s.bias_values, vocab, **fixed)
    if s.penalized:
        _penalty_kernel[(rows,)](
            z, s.history_start, s.history_ids, s.history_counts,
            s.repetition_penalty, s.presence_penalty, s.frequency_penalty, vocab, **fixed
        )  # fmt: skip
    if s.masked:
        _mask_kernel[(rows, -(-vocab // _BLOCK))](z, s.mask_rows, s.masks, vocab, **fixed)
    return z


def sample(logits: Tensor, sampling: DeviceSampling) -> Tensor:
    """One token for each row of logits [R, vocab], int32; NO_TOKEN for a damaged row."""
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    z = adjusted(logits, sampling)
    largest = z.amax(1, keepdim=True)  # passes NaN on
    tokens = _first_largest(z, largest)
    if sampling.drawn:
        tokens = torch.where(sampling.temperature == 0, tokens, _draw(z, largest, sampling))
    return torch.where(largest[:, 0].isfinite(), tokens, NO_TOKEN).int()


def _first_largest(z: Tensor, largest: Tensor) -> Tensor:
    """The lowest id of the largest logit; `argmax` does not promise which one it takes."""
    vocab = z.shape[1]
    ids = torch.arange(vocab, device=z.device)
    return torch.where(z == largest, ids, vocab).amin(1)


def _order(z: Tensor, head: int) -> Tensor:
    """Ids [R, head] by falling logit, ties by rising id; head 0: all of them."""
    vocab = z.shape[1]
    if head == 0 or head >= vocab:
        return z.sort(dim=1, descending=True, stable=True).indices
    bits = (z + 0.0).view(torch.int32)  # of a negative zero, too, those of zero
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(vocab, device=z.device)
    keys = (rising.long() << 32) | (vocab - 1 - ids)  # all different: `topk` breaks ties anyhow
    return vocab - 1 - (keys.topk(head, dim=1).values & 0xFFFFFFFF)


def _draw(z: Tensor, largest: Tensor, sampling: DeviceSampling) -> Tensor:
    order = _order(z, sampling.head)
    ordered = z.gather(1, order)
    ranks = torch.arange(order.shape[1], device=z.device)
    temperature = torch.where(sampling.temperature == 0, 1, sampling.temperature)[:, None]
    weights = ((ordered.double() - largest) / temperature).exp()

    top_k = torch.where(sampling.top_k == 0, z.shape[1], sampling.top_k)
    weights = weights.where(ranks < top_k[:, None], 0)
    sums = weights.cumsum(1)
    top_p = sampling.top_p.double()[:, None]
    shortest = (sums < top_p * sums[:, -1:]).sum(1, keepdim=True)  # rank of the last to keep
    weights = weights.where((ranks <= shortest) | (top_p >= 1), 0)
    min_p = sampling.min_p.double()[:, None]
    weights = weights.where((weights >= min_p) | (min_p <= 0), 0)

    sums = weights.cumsum(1)
    target = uniform(sampling).double()[:, None] * sums[:, -1:]
    drawn = (sums <= target).sum(1, keepdim=True).clamp(max=len(ranks) - 1)
    return order.gather(1, drawn)[:, 0]
