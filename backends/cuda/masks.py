"""Masks of the sampler on their way to the device: the last of a step's inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from localllm.backends.base import MaskArray
from localllm.backends.cuda.kernels.sampling import DeviceSampling
from localllm.backends.cuda.staging import Staging

_WORDS = 1 << 12  # to begin with


class Masks:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = Staging(device, _WORDS)

    def send(self, sampling: DeviceSampling, masks: MaskArray) -> DeviceSampling:
        """The sampling with its masks."""
        self._staging.wait()
        if self._staging.words < masks.size:
            self._staging = Staging(self._device, 2 * masks.size)
        piece, end = self._staging.take(0, masks.shape, masks.dtype)
        piece.host[...] = masks
        self._staging.send(end)
        return replace(sampling, masks=piece.device)
