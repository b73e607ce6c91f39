"""A program and its weights, divided among ranks: stages of layers, each among tensor ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.backends.parallel.division import check_ranks, find_division
from localllm.backends.parallel.slices import Slice
from localllm.backends.parallel.stages import split
from localllm.backends.parallel.tensor_rank import part_of
from localllm.backends.program import Program
from localllm.gguf import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """What one rank computes, and what it has of the file's tensors by the program's names."""

    program: Program
    slices: Mapping[str, Slice]


def check_divisible(
    program: Program, tensors: Mapping[str, Tensor], tensor_ranks: int, stages: int
) -> None:
    """RequestError, as from `divide`, where the model has not so many parts."""
    check_ranks(program, tensor_ranks)
    split(program, tensors, stages)


def divide(
    program: Program, tensors: Mapping[str, Tensor], tensor_ranks: int, stages: int
) -> list[list[Piece]]:
    """Pieces by stage and tensor rank; a RequestError where the model has not so many parts."""
    check_ranks(program, tensor_ranks)
    parts = split(program, tensors, stages)
    divisions = [find_division(part, tensors, tensor_ranks) for part in parts]
    _report_whole([name for division in divisions for name in division.whole], tensor_ranks)
    return [
        [Piece(*part_of(part, division, rank)) for rank in range(tensor_ranks)]
        for part, division in zip(parts, divisions, strict=True)
    ]


def _report_whole(names: Sequence[str], ranks: int) -> None:
    if names:
        more = len(set(names)) - 1
        others = f" and {more} more" if more else ""
        text = f"{names[0]}{others} cannot be divided among {ranks} ranks: each has all of it"
        _log.info(text)
