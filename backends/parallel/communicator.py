"""What the operations of one rank ask of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class UnreachableError(RuntimeError):
    """Another rank is gone, or was waited for too long."""


class Communicator(Protocol):
    """Between the ranks of one step. All ranks of a stage call `gather` in the same order.

    Tensors are float32 [rows, width] on the rank's device. No call with zero rows crosses the wire.
    """

    def gather(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """x of each tensor rank of this stage, in rank order; widths[r] is that of rank r."""

    def send(self, x: Tensor) -> None:
        """To the same tensor rank of the next stage. May return before it has arrived."""

    def receive(self, rows: int, width: int) -> Tensor:
        """From the same tensor rank of the stage before."""
