"""GLM 4, dense."""

from __future__ import annotations

from localllm.models.decoder import Decoder


class Glm4(Decoder):
    """Norms stand on both sides of the branches."""

    post_norms = True
    feed_forward_kind = "fused"

    def setup(self) -> None:
        # Files of the vision models rotate by sections of pairs (j, j + rotated/2); for text, where
        # all sections see the same position, that is an ordinary rotation of those pairs.
        sections = self.keys.integers("rope.dimension_sections")
        self.interleaved_rope = not (len(sections) > 1 and min(sections[:2]) > 0)
