"""A compiled program: whole batches through the list of work, from a graph where there is one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from localllm.backends.base import (
    BLOCK_TOKENS,
    Batch,
    Int32Array,
    SamplingArrays,
    StepLimits,
    mask_words,
)
from localllm.backends.cuda.batch_check import BatchCheck
from localllm.backends.cuda.caches import Caches
from localllm.backends.cuda.fusion import NONE, find_fusions
from localllm.backends.cuda.graphs import Graphs
from localllm.backends.cuda.inputs import Forward, Inputs, staging_words, tile_counts
from localllm.backends.cuda.kernels.sampling import DeviceSampling, sample
from localllm.backends.cuda.lower import Context, Lowering, is_divided
from localllm.backends.cuda.masks import Masks
from localllm.backends.cuda.memory import tells_shortage_at_load, tells_shortage_at_run_time
from localllm.backends.cuda.ranks import Rehearsing
from localllm.backends.cuda.shapes import Shapes, StepShape
from localllm.backends.cuda.staging import Staging, event, host_memory
from localllm.backends.parallel.communicator import Communicator
from localllm.backends.program import Attention, FloatArray, Program, Send

_ANY = 1 << 31  # a bound for what another stage checks
_WARM_TOKENS = (17, 65)  # one more than a launch shape of the matmuls takes: see `tiles_for`


class CudaStep:
    """Runs batches; see `backends.base.Step`.

    `submit` puts the work in the device's queue, sampling included unless a mask is still to come.
    The logits and the inputs lie at fixed addresses. Steps of one token per sequence are filled up
    to one of a few shapes and replayed. `comm` reaches the other ranks of a program that is
    divided, whose steps are launched as they are.
    """

    def __init__(
        self,
        program: Program,
        lowering: Lowering,
        caches: Caches,
        limits: StepLimits,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> None:
        if program.logits is None and not any(isinstance(op, Send) for op in program.ops):
            raise ValueError("the program was not finished")
        self._program, self._lowering, self._limits = program, lowering, limits
        self._device = device
        self._comm = comm
        self._caches = caches
        blocks = [
            n if layers else _ANY for n, layers in zip(caches.n_blocks, caches.layers, strict=True)
        ]
        self._vocab = program.logits.width if program.logits else 0
        self._check = BatchCheck(limits, self._vocab or _ANY, blocks)
        self._work = lowering.lower(find_fusions(program))
        self._ratios = {
            op.q.width // op.head_dim // (op.k.width // op.head_dim)
            for op in program.ops
            if isinstance(op, Attention)
        }
        self._shapes = Shapes(limits)
        words = staging_words(limits, len(caches.n_blocks), self._shapes.most_context, self._ratios)
        self._staging = Staging(device, words)
        self._masks = Masks(device)
        # Ranks talk in the midst of a step, which a graph cannot hold.
        self._graphs = None if is_divided(program) else Graphs(device)
        self._inputs: dict[StepShape, Inputs] = {}  # of the shapes that have a graph
        self._tokens = host_memory(device, limits.logit_rows)
        self._done = event(device)
        self._submitted: tuple[Batch, DeviceSampling] | None = None

    @tells_shortage_at_load
    def warmup(self) -> None:
        """Compiles what steps launch, and records graphs for contexts of usual length."""
        if self._device.type != "cuda":
            self.submit(Batch.first_tokens(min(2, self._limits.tokens), len(self._caches.n_blocks)))
            self.collect()
            return
        context = self._shapes.smallest_context()
        for tokens in {*_WARM_TOKENS, *self._halves()}:
            if tokens <= self._limits.tokens:
                self._rehearse(tokens, 1, context)
        for seqs in reversed(self._shapes.seqs()):  # smaller ones then fit in memory of the larger
            self._rehearse(seqs, seqs, context)
        torch.cuda.synchronize(self._device)

    def fill(self) -> None:
        """Takes as much memory as any step will."""
        context = self._shapes.most_context
        seqs = self._shapes.most_seqs
        self._rehearse(seqs, seqs, context)
        # What attention leaves between its kernels is most somewhere below the most tokens.
        for tokens in self._halves():
            if tokens > seqs:
                self._rehearse(tokens, seqs, context)

    @tells_shortage_at_run_time
    @torch.inference_mode()
    def submit(self, batch: Batch) -> None:
        self._check(batch)
        with self._on_device():
            self._launch(batch, self._shapes.of(batch))

    @tells_shortage_at_run_time
    @torch.inference_mode()
    def collect(self) -> Int32Array:
        batch, sampling = self._latest()
        if not self._vocab:
            return np.zeros(0, np.int32)
        with self._on_device():
            if sampling.masked:
                self._sample(self._masks.send(sampling, batch.sampling.masks))
            if self._done is not None:
                self._done.synchronize()
        tokens: Int32Array = self._tokens[: batch.logit_rows.size].numpy().copy()
        return tokens

    def device_logits(self) -> Tensor:
        """Those of the step last submitted, where they are computed; the next overwrites them."""
        return self._lowering.kept.logits[: self._latest()[0].logit_rows.size]

    def logits(self) -> FloatArray:
        logits: FloatArray = self.device_logits().cpu().numpy()
        return logits.copy() if self._device.type == "cpu" else logits

    @torch.inference_mode()
    def trace(self, batch: Batch) -> list[FloatArray]:
        """Op by op, without fusions and graphs."""
        self._check(batch)
        outputs: list[FloatArray] = []
        with self._on_device():
            forward, _ = self._sent(batch, self._shapes.of(batch))
            context = Context(forward, self._lowering.kept, self._comm)
            for work in self._lowering.lower(NONE):
                work.run(context)
                output: FloatArray = context.read(work.out).float().cpu().numpy()
                outputs.append(output.copy())
        return outputs

    def _launch(self, batch: Batch, shape: StepShape) -> None:
        filled = self._shapes.filled(shape) if self._graphs is not None else None
        self._submitted = None
        if self._graphs is None or filled is None:
            forward, sampling = self._sent(batch, shape)
            self._forward(forward)
        else:
            if filled not in self._inputs:
                tiles = dict.fromkeys(self._ratios, filled.seqs)
                self._inputs[filled] = self._made(filled, tiles)
            inputs = self._inputs[filled]
            sampling = inputs.send(batch)
            self._graphs.run(filled, lambda: self._forward(inputs.forward))
        self._submitted = batch, sampling
        if self._vocab and not sampling.masked:
            self._sample(sampling)

    def _sent(self, batch: Batch, shape: StepShape) -> tuple[Forward, DeviceSampling]:
        """Of a step that is like no other."""
        inputs = self._made(shape, tile_counts(batch.query_start, self._ratios))
        sampling = inputs.send(batch)
        return inputs.forward, sampling

    def _made(self, shape: StepShape, tiles: dict[int, int]) -> Inputs:
        return Inputs(self._staging, shape, tiles, self._caches.n_blocks)

    def _forward(self, forward: Forward) -> None:
        context = Context(forward, self._lowering.kept, self._comm)
        for work in self._work:
            work.run(context)
            for buffer in work.dying:
                del context.values[buffer]

    def _sample(self, sampling: DeviceSampling) -> None:
        """Queues the sampler, and the way of its tokens to the host."""
        rows = len(sampling.temperature)
        tokens = sample(self._lowering.kept.logits[:rows], sampling)
        self._tokens[:rows].copy_(tokens, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def _halves(self) -> list[int]:
        """The most tokens of a step, half as many, and so on: experts get fewer by and by."""
        most = self._limits.tokens
        return [most >> i for i in range(most.bit_length())]

    @torch.inference_mode()
    def _rehearse(self, tokens: int, seqs: int, context: int) -> None:
        """A step of that shape in the blocks that no sequence has, without other ranks."""
        comm, self._comm = self._comm, Rehearsing(self._device)
        try:
            with self._on_device():
                self._launch(*self._rehearsal(tokens, seqs, context))
            self.collect()
        finally:
            self._comm = comm

    def _rehearsal(self, tokens: int, seqs: int, context: int) -> tuple[Batch, StepShape]:
        spare = np.array(self._caches.n_blocks, np.int32)
        starts = np.linspace(0, tokens, seqs + 1).astype(np.int32)
        rows = min(tokens, self._limits.logit_rows if tokens != seqs else seqs)
        batch = Batch(
            ids=np.zeros(tokens, np.int32),
            positions=np.zeros(tokens, np.int32),
            query_start=starts,
            seq_lens=np.ones(seqs, np.int32),
            slots=np.tile(spare[:, None] * BLOCK_TOKENS, tokens),
            block_tables=np.tile(spare[:, None, None], (seqs, 1)),
            logit_rows=np.arange(rows, dtype=np.int32),
            sampling=_by_all_rules(rows, self._vocab),
        )
        return batch, StepShape(tokens, seqs, rows, context)

    def _on_device(self) -> AbstractContextManager[object]:
        """CUDA's current device is each thread's own."""
        return torch.cuda.device(self._device) if self._done is not None else nullcontext()

    def _latest(self) -> tuple[Batch, DeviceSampling]:
        if self._submitted is None:
            raise RuntimeError("nothing was submitted")
        return self._submitted


def _by_all_rules(rows: int, vocab: int) -> SamplingArrays:
    """Takes most memory, and launches every kernel of the sampler; all tokens are allowed."""
    one_each, first = np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32)
    sampling = SamplingArrays.greedy(rows)
    sampling.temperature[:] = 1.0
    sampling.bias_start, sampling.bias_ids = one_each, first
    sampling.bias_values = np.zeros(rows, np.float32)
    sampling.history_start, sampling.history_ids, sampling.history_counts = one_each, first, first
    sampling.mask_rows = first
    sampling.masks = np.full(mask_words(vocab), 2**32 - 1, np.uint32)
    return sampling
