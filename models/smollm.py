"""SmolLM 3: Llama in which every fourth layer has no positions. (SmolLM 1 and 2 are Llamas.)"""

from __future__ import annotations

from localllm.backends.program import RopeTable
from localllm.models.llama import Llama


class SmolLM3(Llama):
    def rope(self, layer: int) -> RopeTable | None:
        return None if layer % 4 == 3 else self.full_rope
