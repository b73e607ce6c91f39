"""A random model in memory: its program, and tensors as a file has them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from localllm.backends.program import Linear, Program
from localllm.gguf import GGUFFile, Tensor, Value
from localllm.models import build_program
from random_model import ARCHITECTURE, Shape, TensorPlan, contents, hyperparameters, tensors

MIX = "Q4_K_M"


class DescribedFile(GGUFFile):
    """A model that lies in no file, for whoever reads keys and shapes."""

    def __init__(self, keys: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
        self.path = Path("random model")
        self._keys, self._described = keys, tensors

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._keys

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._described


def random_model(shape: Shape, context: int) -> tuple[Program, Mapping[str, Tensor]]:
    plans = list(tensors(shape, MIX, shape.vocab))
    with ThreadPoolExecutor() as pool:  # numpy's generators let other threads run
        made = dict(pool.map(_made, plans, range(len(plans))))
    keys = {"general.architecture": ARCHITECTURE, **hyperparameters(shape, shape.vocab)}
    return build_program(DescribedFile(keys, made), context), made


def _made(plan: TensorPlan, seed: int) -> tuple[str, Tensor]:
    data = mmap.mmap(-1, plan.n_bytes)
    blocks = contents(plan, np.random.default_rng(seed))
    np.frombuffer(data, np.uint8)[:] = blocks.reshape(-1)
    vector = plan.rows == 1
    shape = (plan.cols,) if vector else (plan.rows, plan.cols)
    return plan.name, Tensor(plan.name, plan.type, shape, plan.n_bytes, data, 0)


def product_bytes(program: Program, tensors: Mapping[str, Tensor]) -> int:
    """Of all weights that a step reads whole, as the file has them: all but the embedding."""
    return sum(tensors[name].n_bytes for name in _products(program))


def layer_weights(program: Program, tensors: Mapping[str, Tensor]) -> int:
    """How many weights every token is multiplied with: those of the layers, not the output's."""
    *layers, _output = _products(program)
    return sum(int(np.prod(tensors[name].shape)) for name in layers)


def _products(program: Program) -> Iterator[str]:
    for op in program.ops:
        if isinstance(op, Linear):
            yield from op.weights
