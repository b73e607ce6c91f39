"""Decoders in which most layers see only a window of positions."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class SlidingDecoder(Decoder):
    """The file's pattern says which layers have the window; else all but every `period`-th."""

    period: int
    default_window = 0  # 0: without a window in the file, all layers are full

    def setup(self) -> None:
        size = self.keys.count("attention.sliding_window", self.default_window, low=0)
        self.sliding = self._pattern() if size else [False] * self.layers
        self._window = size
        for name, value in (("key", self.head_dim), ("value", self.value_dim)):
            key = f"attention.{name}_length_swa"
            if self.keys.count(key, value) != value:
                self.keys.refuse(key, f"differs from the {value} of full layers")

    def window(self, layer: int) -> int | None:
        return self._window if self.sliding[layer] else None

    def _pattern(self) -> list[bool]:
        key = "attention.sliding_window_pattern"
        flags = self.keys.layer_flags(key, self.layers)
        if flags is not None:
            return flags
        period = self.keys.count(key, self.period)
        return [layer % period < period - 1 for layer in range(self.layers)]
