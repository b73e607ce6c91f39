"""Cutting a program between layers into stages that run one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from localllm.backends.parallel.rewrite import Rewriter, inputs
from localllm.backends.program import Attention, Program, Receive, Send, Value, op_weights
from localllm.errors import RequestError
from localllm.gguf import Tensor


@dataclass(frozen=True)
class Border:
    """Before op number `at`, where `value` is all that later ops need of earlier ones."""

    at: int
    value: Value


def split(program: Program, tensors: Mapping[str, Tensor], stages: int) -> list[Program]:
    """So many programs, of which each sends to the next; the largest has the fewest weight bytes.

    Every stage has all KV groups, some perhaps without layers.
    """
    borders = _borders(program)
    if len(borders) + 1 < stages:
        raise RequestError(
            f"pipeline_parallel_size is {stages}, the model can be cut into "
            f"{len(borders) + 1} stages at most",
            param="pipeline_parallel_size",
        )
    weights = [sum(_bytes(tensors, name) for name in op_weights(op)) for op in program.ops]
    chosen = _balanced([0, *accumulate(weights)], borders, stages)
    starts = [None, *chosen]
    return [_stage(program, *ends) for ends in zip(starts, [*chosen, None], strict=True)]


def _bytes(tensors: Mapping[str, Tensor], name: str) -> int:
    return tensors[name].n_bytes if name in tensors else 0  # loading says what is missing


def _borders(program: Program) -> list[Border]:
    """The last one between each two attentions: where a layer ends."""
    found: list[Border] = []
    between: Border | None = None
    attentions = 0
    alive = _alive(program)
    for at, (op, values) in enumerate(zip(program.ops, alive, strict=True)):
        if len(values) == 1 and values[0].rows == "T":
            between = Border(at, values[0])
        if isinstance(op, Attention):
            if attentions and between:
                found.append(between)
            attentions, between = attentions + 1, None
    return found


def _alive(program: Program) -> Iterator[list[Value]]:
    """Before each op, the outputs of earlier ones that it or a later one reads."""
    last = {value.buffer: at for at, op in enumerate(program.ops) for value in inputs(op)}
    if program.logits:
        last[program.logits.buffer] = len(program.ops)
    alive: list[Value] = []
    for at, op in enumerate(program.ops):
        alive = [value for value in alive if last.get(value.buffer, -1) >= at]
        yield alive
        alive = [*alive, op.out]


def _balanced(totals: list[int], borders: list[Border], stages: int) -> list[Border]:
    """The borders that make the largest stage smallest; totals[i] is the weight of i ops."""
    # Of each number of stages so far, and each border that may end the last of them: the largest
    # stage, and the borders.
    best = [(totals[border.at], [border]) for border in borders]
    for count in range(2, stages):
        best = [
            min(
                (
                    (
                        max(best[j][0], totals[border.at] - totals[borders[j].at]),
                        [*best[j][1], border],
                    )
                    for j in range(count - 2, i)
                ),
                key=lambda choice: choice[0],
                default=(totals[-1] + 1, [border]),
            )
            for i, border in enumerate(borders)
        ]
    if stages == 1:
        return []
    ends = [
        (max(largest, totals[-1] - totals[chosen[-1].at]), chosen)
        for largest, chosen in best
        if len(chosen) == stages - 1
    ]
    return min(ends, key=lambda choice: choice[0])[1]


def _stage(program: Program, start: Border | None, end: Border | None) -> Program:
    rewriter = Rewriter(program)
    stage = rewriter.program
    if start:
        received = rewriter.out(start.value)
        stage.ops.append(Receive(received))
        rewriter.bind(start.value, received)
    first, last = start.at if start else 0, end.at if end else len(program.ops)
    for op in program.ops[first:last]:
        rewriter.op(op)
    if end:
        x = rewriter.read(end.value)
        stage.ops.append(Send(stage.new_value(x.width, x.rows), x))
    elif program.logits:
        stage.finish(rewriter.read(program.logits))
    return stage
