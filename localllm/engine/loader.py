"""From a configuration to an engine that is warmed up."""

from __future__ import annotations

import time
from contextlib import ExitStack

from localllm.backends.base import BLOCK_TOKENS, Backend, ProgressFn, StepLimits
from localllm.backends.program import Program
from localllm.backends.selection import select
from localllm.config import EngineConfig
from localllm.engine.admission import Admission
from localllm.engine.core import EngineCore
from localllm.engine.kv_manager import KVManager
from localllm.engine.memory import (
    SMALLEST_CONTEXT,
    KVNeeds,
    KVPlan,
    check_weights_fit,
    kv_budget,
    plan_kv,
)
from localllm.engine.messages import Ready, Submit
from localllm.engine.runner import Runner
from localllm.engine.scheduler import Scheduler, StepBudget
from localllm.engine.vocabulary import Vocabulary
from localllm.gguf import GGUFFile
from localllm.models import build_program, trained_context
from localllm.sampling_params import SamplingParams
from localllm.text.tokenizer import load_tokenizer

_LOGITS_BYTES = 32 * 2**20  # that prompt logits may add to a step's workspace
_LOGIT_ROWS = 64  # more rows make a step no faster


def load_engine(config: EngineConfig, progress: ProgressFn) -> EngineCore:
    """Loads the model, sizes the KV cache to the memory, compiles and warms up.

    Raises ModelError when the file is at fault or too large for the machine.
    """
    stack = ExitStack()
    try:
        return _load(config, progress, stack)
    except BaseException:
        stack.close()
        raise


def _load(config: EngineConfig, progress: ProgressFn, stack: ExitStack) -> EngineCore:
    """`stack` gets what is to be closed with the engine."""
    began = time.perf_counter()
    file = stack.enter_context(GGUFFile.open(config.model))
    trained = trained_context(file)
    wanted = config.ctx_size or trained
    program = build_program(file, wanted)
    if config.ranks > 1:
        from localllm.backends.parallel.shard import check_divisible

        # Before ranks are started, which takes seconds.
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        check_divisible(program, file.tensors, *sizes)
    selection = select(config)
    backend = selection.backend
    stack.callback(backend.close)
    check_weights_fit(
        backend.memory(), sum(file.tensors[name].n_bytes for name in program.weights())
    )
    weights = backend.load(program, file.tensors, progress)
    plan = _plan(config, program, backend, _limits(config, program, wanted), trained)
    if plan.context < wanted:
        progress(f"the context is {plan.context} tokens: memory holds no more")
        program = build_program(file, plan.context)
    elif wanted > trained:
        progress(f"the context of {wanted} tokens is beyond the {trained} of the training")
    limits = _limits(config, program, plan.context)
    kv = backend.alloc_kv(program.kv_groups, plan.n_blocks)
    step = backend.compile(program, weights, kv, limits, progress)
    step.warmup()
    ready = Ready(
        architecture=file.architecture,
        backend=backend.name,
        device="; ".join(filter(None, (backend.describe(), selection.why))),
        threads=backend.threads,
        context=plan.context,
        vocab_size=_vocab_size(program),
        kv_blocks=plan.n_blocks,
        kv_bytes=plan.bytes,
        load_seconds=time.perf_counter() - began,
    )
    scheduler = _make_scheduler(config, program, plan, limits)
    runner = Runner(step, limits, len(program.kv_groups), _vocab_size(program))
    vocabulary = Vocabulary(lambda: load_tokenizer(file), _vocab_size(program))
    _rehearse(EngineCore(_make_scheduler(config, program, plan, limits), runner, ready, vocabulary))
    return EngineCore(scheduler, runner, ready, vocabulary, stack.close)


def _rehearse(core: EngineCore) -> None:
    """Generates two tokens with books that are thrown away: the first request is then no slower
    than others."""
    core.add(Submit("rehearsal", (0,), SamplingParams(max_tokens=2), frozenset()))
    while core.has_work:
        core.step()


def _limits(config: EngineConfig, program: Program, context: int) -> StepLimits:
    """Logit rows for every sequence, and for prompt logits as many as are worth their memory."""
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    rows = min(_LOGIT_ROWS, _LOGITS_BYTES // (4 * _vocab_size(program)))
    return StepLimits(
        tokens=tokens,
        seqs=min(seqs, tokens),
        logit_rows=min(tokens, max(seqs, rows)),
        context=context,
    )


def _vocab_size(program: Program) -> int:
    assert program.logits is not None
    return program.logits.width


def _plan(
    config: EngineConfig, program: Program, backend: Backend, limits: StepLimits, trained: int
) -> KVPlan:
    """For a program whose weights are loaded; `limits` are those of the context wished for."""
    needs = KVNeeds(
        windows=[group.window for group in program.kv_groups],
        block_bytes=[backend.kv_block_bytes(group) for group in program.kv_groups],
        context=limits.context,
        least_context=config.ctx_size or min(SMALLEST_CONTEXT, trained),
        seqs=limits.seqs,
        chunk=limits.tokens,
    )
    asked = config.kv_cache_memory
    workspace = backend.workspace_bytes(program, limits)  # which may leave more in memory
    memory = backend.memory()
    budget = kv_budget(memory, workspace, asked, config.gpu_memory_utilization)
    return plan_kv(needs, budget, whole=asked is not None or memory.dedicated)


def _make_scheduler(
    config: EngineConfig, program: Program, plan: KVPlan, limits: StepLimits
) -> Scheduler:
    kv = KVManager(
        [group.window for group in program.kv_groups],
        plan.n_blocks,
        BLOCK_TOKENS,
        prefix_cache=config.prefix_cache,
        keep_cached=plan.keep_cached,
    )
    budget = StepBudget(limits.tokens, limits.seqs, limits.logit_rows)
    return Scheduler(kv, budget, Admission(plan.context, _vocab_size(program)))
