"""How much memory a step takes beside weights and cache: an estimate on the high side."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.backends.base import StepLimits
from localllm.backends.program import AllReduce, Attention, Moe, Program, Value
from localllm.backends.torch_common.attention import MOST_TILES, PARTITION, TILE_ROWS
from localllm.backends.torch_common.step import last_uses
from localllm.backends.torch_common.weights import SLAB_ELEMENTS

_FLOAT = 4
_DEQUANTIZING = 16  # bytes per element: codes, factors, products, result
_SAMPLING = 64  # bytes per logit: copies, orders, weights and sums in float64
_COPIES = 3  # of an op's result while it is computed


def workspace_bytes(program: Program, limits: StepLimits) -> int:
    vocab = program.logits.width if program.logits else 0
    elements = max(
        (shape[-1] * shape[-2] for shape in program.shapes.values() if len(shape) > 1), default=0
    )
    return (
        _live_bytes(program, limits)
        + _DEQUANTIZING * min(elements, SLAB_ELEMENTS)
        + max(_transient_bytes(program, limits), default=0)
        + limits.logit_rows * vocab * _SAMPLING
    )


def _rows(value: Value, limits: StepLimits) -> int:
    return limits.tokens if value.rows == "T" else limits.logit_rows


def _live_bytes(program: Program, limits: StepLimits) -> int:
    """The most that values take at once."""
    sizes: dict[int, int] = {}
    most = 0
    for op, dying in zip(program.ops, last_uses(program), strict=True):
        sizes[op.out.buffer] = _rows(op.out, limits) * op.out.width * _FLOAT
        most = max(most, sum(sizes.values()))
        for buffer in dying:
            del sizes[buffer]
    return most


def _transient_bytes(program: Program, limits: StepLimits) -> Iterator[int]:
    """Of each op, what is freed at its end."""
    for op in program.ops:
        inputs = sum(v.width for v in vars(op).values() if isinstance(v, Value))
        yield _COPIES * _FLOAT * inputs * (_rows(op.out, limits) + TILE_ROWS)
        if isinstance(op, Moe):
            yield _COPIES * _FLOAT * limits.tokens * op.used * inputs
        if isinstance(op, AllReduce):
            yield (op.ranks + _COPIES) * _FLOAT * op.x.width * _rows(op.out, limits)
        if isinstance(op, Attention):
            heads, kv_heads = op.q.width // op.head_dim, op.k.width // op.head_dim
            gathered = kv_heads * (op.head_dim + op.value_dim) * PARTITION
            scores = heads * TILE_ROWS * PARTITION
            yield _COPIES * _FLOAT * MOST_TILES * (gathered + scores)
