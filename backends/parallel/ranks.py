"""Who is who among the processes that compute together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """`stages` groups of layers, each divided among `tensor` ranks; rank 0 leads.

    Rank r is tensor rank `r % tensor` of stage `r // tensor`.
    """

    tensor: int
    stages: int

    @property
    def count(self) -> int:
        return self.tensor * self.stages

    @property
    def with_logits(self) -> int:
        """The rank that sends rank 0 the logits, where that is another one."""
        return (self.stages - 1) * self.tensor

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and tensor rank."""
        return divmod(rank, self.tensor)

    def of_stage(self, stage: int) -> list[int]:
        return list(range(stage * self.tensor, (stage + 1) * self.tensor))

    def __str__(self) -> str:
        return f"{self.count} ranks (tensor {self.tensor}, pipeline {self.stages})"
