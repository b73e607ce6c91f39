"""Mistral 3 (Ministral): queries grow with the logarithm of their position."""

from __future__ import annotations

from localllm.backends.program import Value
from localllm.models.llama import Llama


class Mistral3(Llama):
    def setup(self) -> None:
        self.query_growth = self.keys.number("attention.temperature_scale", 0.0)

    def scale_query(self, q: Value) -> Value:
        if not self.query_growth:
            return q
        return self.program.position_scale(q, self.query_growth, self.rope_scaling.original_context)
