"""The sampler, by the rules that `SamplingArrays` states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.backends.base import Int32Array, SamplingArrays, mask_words
from localllm.backends.reference.sampling import NO_TOKEN, uniform

_Array = npt.NDArray[np.generic]


def sample(logits: Tensor, sampling: SamplingArrays) -> Int32Array:
    """One token for each row of logits [R, vocab], on a device that has float64."""
    if not len(logits):
        return np.zeros(0, np.int32)
    x = adjusted(logits, sampling)
    largest = x.amax(1)  # NaN where the row holds one
    tokens = torch.where(torch.isfinite(largest), _first_of(x, largest), NO_TOKEN)
    for row in np.flatnonzero(sampling.temperature != 0).tolist():
        drawn = _drawn(x[row], largest[row], sampling, row)
        tokens[row] = torch.where(tokens[row] == NO_TOKEN, NO_TOKEN, drawn)
    return tokens.to("cpu", torch.int32).numpy()


def adjusted(logits: Tensor, sampling: SamplingArrays) -> Tensor:
    """The logits after bias, penalties and masks."""
    x = logits.clone()
    if sampling.bias_ids.size:
        at = _places(sampling.bias_start, sampling.bias_ids, x)
        x[at] = x[at] + _sent(sampling.bias_values, x)
    if sampling.history_ids.size:
        _penalize(x, sampling)
    if (sampling.mask_rows >= 0).any():
        _forbid(x, sampling)
    return x


def _penalize(x: Tensor, sampling: SamplingArrays) -> None:
    at = _places(sampling.history_start, sampling.history_ids, x)
    rows, values, counts = at[0], x[at], _sent(sampling.history_counts, x)
    repetition = _sent(sampling.repetition_penalty, x)[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    frequency = _sent(sampling.frequency_penalty, x)[rows] * counts.float()
    taken = _sent(sampling.presence_penalty, x)[rows] + frequency
    x[at] = values - torch.where(counts > 0, taken, 0.0)


def _forbid(x: Tensor, sampling: SamplingArrays) -> None:
    vocab = x.shape[1]
    masked = np.flatnonzero(sampling.mask_rows >= 0)
    masks = sampling.masks.reshape(-1, mask_words(vocab)).view(np.uint8)
    packed = _sent(masks[sampling.mask_rows[masked]], x)
    allowed = torch.stack([packed >> bit & 1 for bit in range(8)], -1).flatten(1)[:, :vocab]
    rows = _sent(masked, x)
    x[rows] = torch.where(allowed == 0, -torch.inf, x[rows])


def _first_of(x: Tensor, largest: Tensor) -> Tensor:
    """The lowest id of each row's largest value."""
    ids = torch.arange(x.shape[1], device=x.device)
    last = x.shape[1] - 1  # of rows with NaN, which equals nothing
    return torch.where(x == largest[:, None], ids, last).amin(1)


def _drawn(x: Tensor, largest: Tensor, sampling: SamplingArrays, row: int) -> Tensor:
    """One row by itself, so that sums do not depend on how many there are."""
    falling, order = torch.sort(x, descending=True, stable=True)
    temperature = float(sampling.temperature[row])
    weights = torch.exp((falling.double() - largest.double()) / temperature)
    weights = _filtered(weights, sampling, row)
    u = uniform(int(sampling.seed[row]), int(sampling.choice[row]), int(sampling.index[row]))
    sums = torch.cumsum(weights, 0)
    place = torch.searchsorted(sums, u * sums[-1:], right=True)
    return order[place.clamp(max=len(sums) - 1)][0]


def _filtered(weights: Tensor, sampling: SamplingArrays, row: int) -> Tensor:
    """The weights with zeros for those that top_k, top_p and min_p do not leave."""
    if top_k := int(sampling.top_k[row]):
        weights = weights[:top_k]
    if (top_p := float(sampling.top_p[row])) < 1:
        sums = torch.cumsum(weights, 0)
        last = torch.searchsorted(sums, top_p * sums[-1:])
        places = torch.arange(len(sums), device=sums.device)
        weights = torch.where(places <= last, weights, 0.0)
    if (min_p := float(sampling.min_p[row])) > 0:
        weights = torch.where(weights >= min_p, weights, 0.0)
    return weights


def _places(starts: Int32Array, ids: Int32Array, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return _sent(rows, x), _sent(ids.astype(np.int64), x)


def _sent(array: _Array, like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(array)).to(like.device)
