"""Walks a program over one batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from localllm.backends.base import Batch, Int32Array, SamplingArrays
from localllm.backends.program import (
    Activation,
    ActMul,
    Add,
    AllGather,
    AllReduce,
    Attention,
    Embed,
    FloatArray,
    Linear,
    Moe,
    Norm,
    Op,
    PositionScale,
    Program,
    Receive,
    Rope,
    Scale,
    SelectRows,
    Send,
    Softcap,
    Value,
)
from localllm.backends.reference import ops
from localllm.backends.reference.attention import LayerCache, attention
from localllm.backends.reference.sampling import sample

_OF_RANKS = (AllReduce, AllGather, Receive, Send)


class ReferenceStep:
    """`caches` are [group][layer]. All but the tokens is computed in `submit`."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, FloatArray],
        caches: list[list[LayerCache]],
    ) -> None:
        if any(isinstance(op, _OF_RANKS) for op in program.ops):
            raise ValueError("the reference backend has no ranks")
        if program.logits is None:
            raise ValueError("the program was not finished")
        self._program = program
        self._result = program.logits
        self._weights = weights
        self._caches = caches
        self._dying = _last_uses(program)
        self._logits: FloatArray | None = None
        self._sampling: SamplingArrays | None = None

    def warmup(self) -> None:
        for name in self._program.weights():
            self._weights[name]  # the first look dequantizes

    def submit(self, batch: Batch) -> None:
        buffers: dict[int, FloatArray] = {}
        for op, dying in zip(self._program.ops, self._dying, strict=True):
            buffers[op.out.buffer] = self._run(op, buffers, batch)
            for buffer in dying:
                del buffers[buffer]
        self._logits = buffers[self._result.buffer]
        self._sampling = batch.sampling

    def collect(self) -> Int32Array:
        if self._logits is None or self._sampling is None:
            raise RuntimeError("nothing was submitted")
        return sample(self._logits, self._sampling)

    def logits(self) -> FloatArray:
        if self._logits is None:
            raise RuntimeError("nothing was submitted")
        return self._logits

    def trace(self, batch: Batch) -> list[FloatArray]:
        buffers: dict[int, FloatArray] = {}
        outputs = []
        for op in self._program.ops:
            buffers[op.out.buffer] = self._run(op, buffers, batch)
            outputs.append(buffers[op.out.buffer])
        return outputs

    def _run(self, op: Op, buffers: Mapping[int, FloatArray], batch: Batch) -> FloatArray:
        # Weights of a damaged file may hold anything: infinities come out as such, silently.
        with np.errstate(all="ignore"):
            return self._compute(op, buffers, batch)

    def _compute(self, op: Op, buffers: Mapping[int, FloatArray], batch: Batch) -> FloatArray:
        def read(value: Value) -> FloatArray:
            window = buffers[value.buffer][:, value.offset : value.offset + value.width]
            return np.ascontiguousarray(window)

        def weight(name: str | None) -> FloatArray | None:
            return None if name is None else self._weights[name]

        match op:
            case Embed():
                return self._weights[op.weight][batch.ids]
            case Norm():
                return ops.norm(
                    read(op.x),
                    weight(op.weight),
                    weight(op.bias),
                    eps=op.eps,
                    kind=op.kind,
                    group=op.group,
                )
            case Linear():
                return self._linear(op, read(op.x))
            case Add():
                return read(op.a) + read(op.b)
            case Scale():
                return read(op.x) * np.float32(op.factor)
            case Softcap():
                return ops.softcap(read(op.x), op.cap)
            case Rope():
                return ops.rope(read(op.x), batch.positions, op.head_dim, op.table)
            case PositionScale():
                return ops.position_scale(
                    read(op.x),
                    batch.positions,
                    beta=op.beta,
                    floor_scale=op.floor_scale,
                    offset=op.offset,
                )
            case Attention():
                cache = self._caches[op.group][op.layer]
                q, k, v = read(op.q), read(op.k), read(op.v)
                return attention(op, q, k, v, weight(op.sinks), cache, batch)
            case Activation():
                return ops.activate(read(op.x), op.act)
            case ActMul():
                return ops.activate(read(op.gate), op.act) * read(op.up)
            case Moe():
                return ops.moe(
                    read(op.x),
                    read(op.logits),
                    self._weights[op.gate],
                    self._weights[op.up],
                    self._weights[op.down],
                    used=op.used,
                    act=op.act,
                    gating=op.gating,
                    normalize=op.normalize,
                    scale=op.scale,
                )
            case SelectRows():
                return read(op.x)[batch.logit_rows]
            case AllReduce() | AllGather() | Receive() | Send():
                raise AssertionError(op)  # refused above

    def _linear(self, op: Linear, x: FloatArray) -> FloatArray:
        parts = []
        for name, bias in zip(op.weights, op.biases, strict=True):
            part = ops.linear(x, self._weights[name])
            parts.append(part if bias is None else part + self._weights[bias])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _last_uses(program: Program) -> list[list[int]]:
    """For each op, the buffers that nothing reads after it."""
    dying: list[list[int]] = [[] for _ in program.ops]
    kept = {program.logits.buffer} if program.logits else set()
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        values = [value for value in vars(op).values() if isinstance(value, Value)]
        for buffer in {value.buffer for value in values} - kept:
            dying[index].append(buffer)
            kept.add(buffer)
    return dying
