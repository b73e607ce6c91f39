"""How fast a random model of llama-8b's shape in Q4_K_M is, beside what the GPU can do at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from gpu_checks.check import Check, Json
from gpu_checks.load import Load, blocks_for
from gpu_checks.random_program import MIX, layer_weights, product_bytes, random_model
from gpu_checks.timing import kernel_time, seconds, wait_for
from localllm.backends.base import StepLimits
from localllm.backends.cuda.backend import CudaBackend
from random_model import SHAPES, Shape

# Goals: shares of the copy's bandwidth, of the library's matmul rate, of a step.
READ_FLOOR, READ_AIM = 0.50, 0.70
COMPANY_FLOOR = 25.0  # times the tokens per second of one sequence
PREFILL_FLOOR = 0.45
OUTSIDE_LIMIT = 0.05

REHEARSED_SHAPE = Shape(layers=1, width=256, ffn=256, heads=4, kv_heads=1, vocab=64)


class Plan:
    """What is run: in a rehearsal next to nothing."""

    def __init__(self, rehearsal: bool) -> None:
        self.shape_name = "next to nothing" if rehearsal else "llama-8b"
        self.shape = REHEARSED_SHAPE if rehearsal else SHAPES["llama-8b"]
        self.batches = (1, 2) if rehearsal else (1, 16, 64)
        self.prefill = 3 if rehearsal else 4096
        self.prompt = 1 if rehearsal else 64  # before decoding starts
        self.warm = 0 if rehearsal else 8
        self.timed = 1 if rehearsal else 48
        self.profiled = 1 if rehearsal else 8
        self.tries = 1 if rehearsal else 3

    @property
    def decoded(self) -> int:
        """Positions that a sequence reaches."""
        return self.prompt + self.warm + self.timed + self.profiled

    @property
    def limits(self) -> StepLimits:
        most = max(self.batches)
        context = max(self.prefill, self.decoded)
        return StepLimits(max(self.prefill, most * self.prompt), most, most, context)


def run(check: Check) -> None:
    measure(check, fast=False)


def measure(check: Check, fast: bool) -> None:
    plan = Plan(check.rehearsal)
    began = time.perf_counter()
    program, tensors = random_model(plan.shape, plan.limits.context)
    check.put("model", f"{plan.shape_name}, {MIX}")
    check.put("making the model, s", check.measured(time.perf_counter() - began))
    n_bytes, weights = product_bytes(program, tensors), layer_weights(program, tensors)
    check.put("bytes of weights read by a step", n_bytes)
    check.put("weights that meet every token", weights)

    began = time.perf_counter()
    backend = CudaBackend(check.dtype, check.device, fast)
    check.put("backend", backend.describe())
    loaded = backend.load(program, tensors, ignore)
    check.put("loading, s", check.measured(time.perf_counter() - began))
    most = max(plan.batches)
    blocks = max(blocks_for(most, plan.decoded), blocks_for(1, plan.limits.context))
    caches = backend.alloc_kv(program.kv_groups, [blocks] * len(program.kv_groups))
    began = time.perf_counter()
    step = backend.compile(program, loaded, caches, plan.limits, ignore)
    step.warmup()
    check.put("warm-up, s", check.measured(time.perf_counter() - began))

    alone = 0.0
    for batch in plan.batches:
        load = Load(step, batch, plan.decoded, plan.shape.vocab)
        load.prompt(plan.prompt)
        figures, rate = decoding(check, plan, load, n_bytes)
        alone = alone or rate
        if batch == most:
            figures["times batch 1"] = check.at_least(rate / alone, COMPANY_FLOOR)
        check.put(f"decode, batch {batch}", figures)
    load = Load(step, 1, plan.limits.context, plan.shape.vocab)
    check.put(f"prefill, {plan.prefill} tokens", prefill(check, plan, load, weights))


def decoding(check: Check, plan: Plan, load: Load, n_bytes: int) -> tuple[dict[str, Json], float]:
    """The figures, and tokens per second of all sequences together."""
    each = steps(load.decode, check, plan)
    rate = len(load.tables) / each
    read = n_bytes / each / check.of_environment("copy_bytes_per_second")
    found: dict[str, Json] = {
        "tokens per second": check.measured(rate),
        "step, ms": check.measured(each * 1e3),
        "weights read, of the copy's bandwidth": (
            check.at_least(read, READ_FLOOR, READ_AIM)
            if len(load.tables) == 1
            else check.measured(read)
        ),
    }
    found |= beside_kernels(check, load.decode, each, plan.profiled)
    return found, rate


def steps(work: Callable[[], object], check: Check, plan: Plan) -> float:
    """Seconds of one step, the median; each is waited for, as its tokens go into the next."""
    times = []
    for number in range(plan.warm + plan.timed):
        began = time.perf_counter()
        work()
        if number >= plan.warm:
            times.append(time.perf_counter() - began)
    wait_for(check.device)
    return statistics.median(times)


def beside_kernels(
    check: Check, work: Callable[[], object], each: float, calls: int
) -> dict[str, Json]:
    """The share of a step's time in which no kernel runs, and where the kernels' time goes."""
    kernels = kernel_time(work, check.device, calls)
    named: dict[str, Json] = {name: s * 1e6 for name, s in kernels.by_name.items()}
    outside = 1 - kernels.busy / each if named else math.nan  # a profiler may be refused
    return {
        "outside kernels": check.below(outside, OUTSIDE_LIMIT),
        "kernels, us": named,
    }


def prefill(check: Check, plan: Plan, load: Load, weights: int) -> dict[str, Json]:
    """One prompt in one step. Attention's own products do not count as work done."""

    def work() -> None:
        load.prompt(plan.prefill)

    each = seconds(work, check.device, calls=1, tries=plan.tries)
    rate = 2 * weights * plan.prefill / each
    share = rate / check.of_environment("bf16_matmul_flops")
    return {
        "tokens per second": check.measured(plan.prefill / each),
        "of the bf16 matmul rate": check.at_least(share, PREFILL_FLOOR),
        **beside_kernels(check, work, each, 1),
    }


def ignore(_line: str) -> None:
    pass
