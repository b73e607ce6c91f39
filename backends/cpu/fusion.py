"""Which ops of a program share a kernel, because that saves a pass over memory and a call.

A norm, or a gated activation, leaves its rows quantized for the matmuls that read them. A matmul
adds the residual. Queries and keys are rotated where keys are stored. Fusing changes who computes
a value, never how: results have the same bits as those of the ops one by one (`NONE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.backends.cpu.matmul import ActivationFormat
from localllm.backends.cpu.weights import Weights
from localllm.backends.program import ActMul, Add, Attention, Linear, Norm, Program, Rope, Value
from localllm.backends.uses import Uses


@dataclass(frozen=True)
class Panel:
    """An op's output as matmuls read it; `alone` if nobody wants it as float32."""

    format: ActivationFormat
    alone: bool


@dataclass(frozen=True)
class Fusions:
    """Keys are the outputs of ops."""

    panels: Mapping[Value, Panel] = field(default_factory=dict)  # of Norm and ActMul
    residuals: Mapping[Value, Add] = field(default_factory=dict)  # of Linear
    rotations: Mapping[Value, tuple[Rope, Rope]] = field(default_factory=dict)  # q, k of Attention
    absorbed: frozenset[Value] = frozenset()  # need no calls of their own


NONE = Fusions()


def find_fusions(program: Program, weights: Weights) -> Fusions:
    return _Finder(program, weights).find()


class _Finder:
    def __init__(self, program: Program, weights: Weights) -> None:
        self._ops, self._weights = program.ops, weights
        self._uses = Uses(program)

    def find(self) -> Fusions:
        panels: dict[Value, Panel] = {}
        residuals: dict[Value, Add] = {}
        rotations: dict[Value, tuple[Rope, Rope]] = {}
        absorbed: set[Value] = set()
        for at, op in enumerate(self._ops):
            match op:
                case Norm() if op.group == op.x.width:
                    if panel := self._panel(op.out):
                        panels[op.out] = panel
                case ActMul():
                    if (panel := self._panel(op.out)) and panel.alone:
                        panels[op.out] = panel
                case Linear():
                    if add := self._uses.residual(at, op):
                        residuals[op.out] = add
                        absorbed.add(add.out)
                case Attention():
                    if pair := self._uses.rotation(op):
                        rotations[op.out] = pair
                        absorbed |= {rope.out for rope in pair}
        return Fusions(panels, residuals, rotations, frozenset(absorbed))

    def _panel(self, x: Value) -> Panel | None:
        """The format of the first matrix that multiplies x."""
        readers = self._uses.readers(x)
        formats = [
            self._weights.matrices[name].format.activation
            for op in readers
            if isinstance(op, Linear) and op.x == x
            for name in op.weights
        ]
        if not formats or not formats[0].is_quantized:
            return None
        linear = all(isinstance(op, Linear) and op.x == x for op in readers)
        return Panel(formats[0], alone=linear and len(set(formats)) == 1)
