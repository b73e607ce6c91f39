"""Products by Metal kernels where there is one for the format, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.backends.mps.shaders.matvec import ShaderLibrary, has_kernel, matvec
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import Linear
from localllm.backends.torch_common.arithmetic import linear
from localllm.backends.torch_common.kv_cache import LayerCache
from localllm.backends.torch_common.lower import Closure, Context, Lowering
from localllm.backends.torch_common.target import Target
from localllm.backends.torch_common.weights import Matrix, Weights


class MpsLowering(Lowering):
    """One kernel multiplies a format's matrices with one vector and with a thousand, and torch all
    others, so that a row's bits do not depend on the batch. The kernels take vectors in float32,
    whatever the target's dtype."""

    def __init__(
        self,
        target: Target,
        weights: Weights,
        caches: list[list[LayerCache]],
        shaders: ShaderLibrary,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(target, weights, caches, comm)
        self._shaders = shaders

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        out = torch.empty(len(x), matrix.rows, device=x.device)
        self._multiply(x, matrix, out)
        return out

    def linear(self, op: Linear) -> Closure:
        matrices = [self.weights.matrices[name] for name in op.weights]
        biases = [self.weights.vector(name) for name in op.biases]

        def run(c: Context) -> Tensor:
            x = c.read(op.x)
            out = torch.empty(len(x), op.out.width, device=x.device)
            windows = torch.split(out, [matrix.rows for matrix in matrices], 1)
            for matrix, bias, window in zip(matrices, biases, windows, strict=True):
                self._multiply(x, matrix, window)
                if bias is not None:
                    window.add_(bias)
            return out

        return run

    def _multiply(self, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        if has_kernel(matrix):
            matvec(self._shaders, x, matrix, out)
        else:
            out.copy_(linear(self.target, x, matrix))
