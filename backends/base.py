"""The whole interface between the engine and a device.

A backend loads the weights that a program names, allocates the paged KV cache, and compiles the
program into a step. A step runs one batch: any mix of sequences, each with any number of new
tokens. All batch arrays are C-contiguous numpy arrays owned by the caller and are not changed
between `submit` and `collect`, save `sampling.masks`: they count as they are when `collect` is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from localllm.backends.program import FloatArray, KVGroup, Program
from localllm.gguf import Tensor

BLOCK_TOKENS = 16  # positions per KV block

Int32Array: TypeAlias = npt.NDArray[np.int32]
MaskArray: TypeAlias = npt.NDArray[np.uint32]
ProgressFn: TypeAlias = Callable[[str], None]


def mask_words(vocab: int) -> int:
    """Words of a mask that has a bit for each token."""
    return -(-vocab // 32)


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on the device. `available` is what a new allocation may use without swapping.

    `dedicated`: there is nobody else for whom some of it should be left.
    """

    total: int
    available: int
    dedicated: bool = False


@dataclass(frozen=True)
class StepLimits:
    """The largest batch that a step has to take."""

    tokens: int  # T
    seqs: int  # S
    logit_rows: int  # R
    context: int  # positions of one sequence


@dataclass
class SamplingArrays:
    """One entry per logit row; see `SamplingParams` for the meaning and order of the fields.

    `history_*` lists, for rows with penalties, each distinct token id of prompt and output with
    its count in the output (0: in the prompt alone); other rows have an empty range. With z the
    row's float32 logits after bias and penalties (first repetition, then z -= presence +
    frequency * count where count > 0) and mask, temperature 0 takes the largest z (ties: lower id).

    A row's mask is row `mask_rows[r]` of `masks` (-1: none), `mask_words(vocab)` words of which bit
    t % 32 of word t // 32 allows token t; the z of a token that is not allowed is -inf.

    Otherwise tokens stand in order of falling z (ties: lower id), each with the weight
    exp((z - largest z) / temperature), and every filter keeps a head of this order: top_k the
    first k tokens; top_p the shortest head that has at least top_p of the weight that top_k kept;
    min_p the tokens of weight min_p or more. The draw takes the first token at which the running
    sum of weights exceeds u times the weight that all filters kept. Sums are float64.

    A row's random numbers are Philox4x32-10 with key `seed` and counter (index, choice, 0, 0),
    the first output word giving u = (word >> 8) * 2**-24.

    A row whose z holds NaN or +inf, or nothing above -inf, gives token -1.
    """

    temperature: FloatArray
    top_k: Int32Array
    top_p: FloatArray
    min_p: FloatArray
    repetition_penalty: FloatArray
    presence_penalty: FloatArray
    frequency_penalty: FloatArray
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    index: npt.NDArray[np.uint32]
    bias_start: Int32Array  # [R+1] ranges in bias_ids, bias_values
    bias_ids: Int32Array
    bias_values: FloatArray
    history_start: Int32Array  # [R+1] ranges in history_ids, history_counts
    history_ids: Int32Array
    history_counts: Int32Array
    mask_rows: Int32Array
    masks: MaskArray  # flat, M rows

    @classmethod
    def greedy(cls, rows: int) -> Self:
        """The most likely token of each row, nothing else asked for."""
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            repetition_penalty=np.ones(rows, np.float32),
            presence_penalty=np.zeros(rows, np.float32),
            frequency_penalty=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            choice=np.zeros(rows, np.uint32),
            index=np.zeros(rows, np.uint32),
            bias_start=np.zeros(rows + 1, np.int32),
            bias_ids=np.zeros(0, np.int32),
            bias_values=np.zeros(0, np.float32),
            history_start=np.zeros(rows + 1, np.int32),
            history_ids=np.zeros(0, np.int32),
            history_counts=np.zeros(0, np.int32),
            mask_rows=np.full(rows, -1, np.int32),
            masks=np.zeros(0, np.uint32),
        )


@dataclass
class Batch:
    """One step's work: S sequences with T new tokens in all.

    Sequence s owns tokens query_start[s]..query_start[s+1], the last of its seq_lens[s] known
    positions. For KV group g, token t is stored in slot slots[g, t] = block * BLOCK_TOKENS +
    position % BLOCK_TOKENS, and block i of sequence s is block_tables[g, s, i]; entries that a
    window has left behind are -1 and never read. logit_rows are token indices in rising order;
    `sampling` has one entry for each of them.
    """

    ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    query_start: Int32Array  # [S+1]
    seq_lens: Int32Array  # [S]
    slots: Int32Array  # [G, T]
    block_tables: Int32Array  # [G, S, B]
    logit_rows: Int32Array  # [R]
    sampling: SamplingArrays

    @classmethod
    def first_tokens(cls, tokens: int, groups: int) -> Self:
        """One greedy sequence of a few tokens in block 0 of every group; asks for one token."""
        return cls(
            ids=np.zeros(tokens, np.int32),
            positions=np.arange(tokens, dtype=np.int32),
            query_start=np.array([0, tokens], np.int32),
            seq_lens=np.array([tokens], np.int32),
            slots=np.tile(np.arange(tokens, dtype=np.int32), (groups, 1)),
            block_tables=np.zeros((groups, 1, 1), np.int32),
            logit_rows=np.array([tokens - 1], np.int32),
            sampling=SamplingArrays.greedy(1),
        )


class Step(Protocol):
    """A compiled program. `submit` may return before the work is done; depth is one.

    `submit` and `collect` raise DeviceOutOfMemoryError where memory ran out for this batch.
    """

    def warmup(self) -> None:
        """Makes the first real step as fast as the tenth; touches only KV block 0."""

    def submit(self, batch: Batch) -> None: ...

    def collect(self) -> Int32Array:
        """Waits and returns the sampled token of each logit row [R]."""

    def logits(self) -> FloatArray:
        """Raw logits [R, vocab] of the step last collected; valid until the next `submit`."""

    def trace(self, batch: Batch) -> list[FloatArray]:
        """Runs the batch and returns every op's output [rows, width], in program order."""


class Backend(Protocol):
    """One device. Values that pass through (`weights`, `kv`) are opaque to the caller."""

    name: str
    threads: int  # that compute

    def memory(self) -> MemoryInfo: ...

    def describe(self) -> str:
        """One line for log and /health: which device, instruction set and threads, and why."""

    def load(self, program: Program, tensors: Mapping[str, Tensor], progress: ProgressFn) -> Any:
        """Brings the program's weights to the device in its own layout."""

    def kv_block_bytes(self, group: KVGroup) -> int:
        """Bytes of one block over all layers of the group."""

    def alloc_kv(self, groups: Sequence[KVGroup], n_blocks: Sequence[int]) -> Any:
        """One paged cache per group; memory is touched only when a block is first written."""

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """What `compile` will allocate for buffers and logits."""

    def compile(
        self, program: Program, weights: Any, kv: Any, limits: StepLimits, progress: ProgressFn
    ) -> Step: ...

    def close(self) -> None:
        """Ends worker threads and frees the device's memory."""
