"""Which operations of a program tensor ranks share, and how.

The ways, best first: a region of its own for each rank and a sum at its end; the region, then the
columns of all; rows of a single matrix, then the columns of all. What allows none of them is done
by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm

from localllm.backends.parallel.layout import Interval, head_shares, shares, wide_shares
from localllm.backends.parallel.regions import Flow, IndivisibleError, Region
from localllm.backends.program import Embed, Linear, Moe, Op, Program, Value
from localllm.errors import RequestError
from localllm.gguf import Tensor
from localllm.gguf.blocks import block_size

_ROWS = 32  # that rows of single matrices are cut by, where there are enough


@dataclass
class Division:
    """Keys are the outputs of ops."""

    ranks: int
    regions: list[Region]  # of each rank
    summed: dict[Value, list[Interval]] = field(default_factory=dict)  # Linear and Moe: columns
    gathered: dict[Value, list[Interval]] = field(default_factory=dict)  # inputs of Linear
    rows: dict[Value, list[Interval]] = field(default_factory=dict)  # Linear and Embed
    whole: list[str] = field(default_factory=list)  # weights that nothing divides


def check_ranks(program: Program, ranks: int) -> None:
    """Raises a RequestError where a rank would have nothing to do."""
    flow = Flow(program)
    most = min((_most_ranks(flow, op) for op in _ends(program)), default=ranks)
    if most < ranks:
        raise RequestError(
            f"tensor_parallel_size is {ranks}, the largest that leaves no rank without heads "
            f"is {most}",
            param="tensor_parallel_size",
        )


def find_division(program: Program, tensors: Mapping[str, Tensor], ranks: int) -> Division:
    division = Division(ranks, [{} for _ in range(ranks)])
    if ranks > 1:
        _Finder(program, tensors, division).find()
    return division


class _Finder:
    def __init__(self, program: Program, tensors: Mapping[str, Tensor], division: Division) -> None:
        self._program, self._tensors, self._division = program, tensors, division
        self._ranks = division.ranks
        self._flow = Flow(program)

    def find(self) -> None:
        for end in _ends(self._program):
            self._divide_region(end)
        for op in self._program.ops:
            match op:
                case Moe():
                    self._divide_experts(op)
                case Embed(weight=weight):
                    self._divide_rows(op, self._shape(weight)[-2])
                case Linear() if op.shard != "none" and not self._is_divided(op):
                    if not any(isinstance(reader, Moe) for reader in self._flow.readers(op.out)):
                        self._divide_rows(op, op.out.width)
                case _:
                    pass

    def _divide_region(self, end: Linear) -> None:
        for columns, gathers in self._ways(end):
            try:
                regions = [self._flow.region(end, share) for share in columns]
            except IndivisibleError:
                continue
            for own, region in zip(self._division.regions, regions, strict=True):
                own |= region
            (self._division.gathered if gathers else self._division.summed)[end.out] = columns
            return

    def _ways(self, end: Linear) -> Iterator[tuple[list[Interval], bool]]:
        """Shares of the columns of its input, and whether the columns are needed by all again."""
        block = self._block(*end.weights)
        attention = self._flow.attention_before(end.x)
        for grain in dict.fromkeys((block, 1)):
            if attention:
                heads = attention.q.width // attention.head_dim
                kv_heads = attention.k.width // attention.head_dim
                together = lcm(attention.value_dim, grain) // attention.value_dim
                found = head_shares(heads, kv_heads, together, self._ranks)
                columns = found and [_times(share, attention.value_dim) for share in found]
            else:
                columns = wide_shares(end.x.width, grain, self._ranks)
            if columns:
                yield columns, grain % block != 0

    def _divide_experts(self, op: Moe) -> None:
        columns = wide_shares(self._shape(op.down)[-1], self._block(op.down), self._ranks)
        if columns:
            self._division.summed[op.out] = columns
        else:
            self._division.whole += [op.gate, op.up, op.down]

    def _divide_rows(self, op: Linear | Embed, rows: int) -> None:
        grain = _ROWS
        while grain > 1 and rows < grain * self._ranks:
            grain //= 2
        found = shares(rows, grain, self._ranks)
        if found:
            self._division.rows[op.out] = found
        else:
            self._division.whole += op.weights if isinstance(op, Linear) else [op.weight]

    def _is_divided(self, op: Op) -> bool:
        return op.out in self._division.summed or op.out.buffer in self._division.regions[0]

    def _shape(self, weight: str) -> tuple[int, ...]:
        return self._program.shapes[weight]

    def _block(self, *weights: str) -> int:
        return lcm(*(block_size(self._tensors[name].type) for name in weights))


def _ends(program: Program) -> list[Linear]:
    """Where regions may end."""
    return [op for op in program.ops if isinstance(op, Linear) and op.shard == "row"]


def _most_ranks(flow: Flow, end: Linear) -> int:
    attention = flow.attention_before(end.x)
    return attention.q.width // attention.head_dim if attention else end.x.width


def _times(interval: Interval, factor: int) -> Interval:
    return interval[0] * factor, interval[1] * factor
