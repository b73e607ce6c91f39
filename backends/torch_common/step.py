"""A compiled program: one batch through the list of closures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import BLOCK_TOKENS, Batch, Int32Array, StepLimits
from localllm.backends.cpu.batch_check import check
from localllm.backends.program import FloatArray, Program, Send, Value
from localllm.backends.torch_common.attention import plan
from localllm.backends.torch_common.kv_cache import LayerCache
from localllm.backends.torch_common.lower import Context, Lowering
from localllm.backends.torch_common.sampling import sample

_ANY = 1 << 31  # a bound for what another stage checks


class TorchStep:
    """Runs batches; see `backends.base.Step`.

    `submit` puts all work but the sampling in the device's queue; `collect` samples and waits. A
    stage that is not the last has no logits and samples nothing.
    """

    def __init__(self, program: Program, lowering: Lowering, limits: StepLimits) -> None:
        sends = any(isinstance(op, Send) for op in program.ops)
        if program.logits is None and not sends:
            raise ValueError("the program was not finished")
        self._program = program
        self._result = program.logits
        self._target = lowering.target
        self._limits = limits
        self._closures = lowering.program(program)
        self._dying = last_uses(program)
        self._blocks = _block_counts(lowering.caches)
        self._logits: Tensor | None = None
        self._batch: Batch | None = None

    def warmup(self) -> None:
        for tokens in (min(BLOCK_TOKENS, self._limits.tokens), 1):
            self.submit(Batch.first_tokens(tokens, len(self._blocks)))
            self.collect()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        context = self._context(batch)
        for op, run, dying in zip(self._program.ops, self._closures, self._dying, strict=True):
            context.values[op.out.buffer] = run(context)
            for buffer in dying:
                del context.values[buffer]
        self._logits = self._read_result(context)
        self._batch = batch

    @torch.inference_mode()
    def collect(self) -> Int32Array:
        logits, batch = self._submitted()
        if self._result is None:
            return np.zeros(0, np.int32)
        return sample(logits.to(self._target.precise), batch.sampling)

    def logits(self) -> FloatArray:
        rows: FloatArray = self._submitted()[0].cpu().numpy()
        return rows

    def device_logits(self) -> Tensor:
        """Those of the step last submitted, where they were computed."""
        return self._submitted()[0]

    @torch.inference_mode()
    def trace(self, batch: Batch) -> list[FloatArray]:
        context = self._context(batch)
        outputs: list[FloatArray] = []
        for op, run in zip(self._program.ops, self._closures, strict=True):
            context.values[op.out.buffer] = out = run(context)
            outputs.append(out.cpu().numpy())
        return outputs

    def _submitted(self) -> tuple[Tensor, Batch]:
        if self._logits is None or self._batch is None:
            raise RuntimeError("nothing was submitted")
        return self._logits, self._batch

    def _read_result(self, context: Context) -> Tensor:
        """No columns where a later stage has the logits."""
        if self._result is None:
            return torch.empty(len(context.logit_rows), 0)
        return context.read(self._result)

    def _context(self, batch: Batch) -> Context:
        vocab = self._result.width if self._result else _ANY
        check(batch, self._limits, vocab, self._blocks)
        target = self._target

        def sent(array: Int32Array, device: torch.device) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return Context(
            ids=sent(batch.ids, target.device),
            logit_rows=sent(batch.logit_rows, target.device),
            positions=sent(batch.positions, target.precise),
            angles={},
            plans=[
                plan(target, group, number, batch)
                for number, group in enumerate(self._program.kv_groups)
            ],
            values={},
        )


def last_uses(program: Program) -> list[list[int]]:
    """For each op, the buffers that nothing reads after it."""
    dying: list[list[int]] = [[] for _ in program.ops]
    kept = {program.logits.buffer} if program.logits else set()
    for index in range(len(program.ops) - 1, -1, -1):
        values = [value for value in vars(program.ops[index]).values() if isinstance(value, Value)]
        for buffer in {value.buffer for value in values} - kept:
            dying[index].append(buffer)
            kept.add(buffer)
    return dying


def _block_counts(caches: Sequence[Sequence[LayerCache]]) -> list[int]:
    """Of a group whose layers are all in other stages, any number."""
    return [layers[0].n_blocks if layers else _ANY for layers in caches]
