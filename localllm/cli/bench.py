"""localllm bench"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.common import (
    Backend,
    BackendName,
    Debug,
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Fast,
    GpuMemoryUtilization,
    Isa,
    KVCacheDtype,
    KVCacheDtypeName,
    ModelArgument,
    PipelineParallelSize,
    TensorParallelSize,
    Threads,
    errors_in_one_line,
    find_model,
    follow_rank_0,
    log_to_stderr,
)
from localllm.config import EngineConfig

if TYPE_CHECKING:
    from localllm.cli.measure import Workload
    from localllm.engine.messages import Ready


def bench(
    model: ModelArgument,
    threads: Threads = None,
    backend: Backend = BackendName.AUTO,
    device: Device = DeviceName.AUTO,
    dtype: Dtype = DtypeName.AUTO,
    kv_cache_dtype: KVCacheDtype = KVCacheDtypeName.AUTO,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    fast: Fast = False,
    isa: Isa = "auto",
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Length of the prompt that is read.")
    ] = 512,
    gen_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to write per sequence.")
    ] = 64,
    reps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Times to measure, after one to warm up.")
    ] = 3,
    depth: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens in the context before writing starts.")
    ] = 0,
    batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences to write together; speeds add up.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Instead, show where the time of one step of each goes (CPU backend).",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure how many tokens a second the engine reads (prefill) and writes (decode)."""
    with errors_in_one_line(debug):
        from localllm.cli.measure import Workload

        work = Workload(
            prompt_tokens=prompt_tokens, gen_tokens=gen_tokens, depth=depth, batch=batch
        )
        path = find_model(model)
        log_to_stderr(debug)
        config = EngineConfig(
            model=path,
            backend=backend.value,
            device=device.value,
            dtype=dtype.value,
            kv_cache_dtype=kv_cache_dtype.value,
            gpu_memory_utilization=gpu_memory_utilization,
            fast=fast,
            threads=threads,
            isa=isa,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            ctx_size=work.context,
            max_num_seqs=batch,
            max_num_batched_tokens=work.step_tokens,
            prefix_cache=False,
        )
        if breakdown:
            from localllm.cli.breakdown import breakdown as break_down

            print(break_down(config, work))
            return
        follow_rank_0(config)
        result = asyncio.run(_measure(config, work, reps))
        print(json.dumps(result.as_dict()) if as_json else result.as_text())


@dataclass(frozen=True)
class _Result:
    model: str
    work: Workload
    ready: Ready
    prefill: list[float]
    decode: list[float]

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "backend": self.ready.backend,
            "device": self.ready.device,
            "threads": self.ready.threads,
            "prompt_tokens": self.work.prompt_tokens,
            "gen_tokens": self.work.gen_tokens,
            "depth": self.work.depth,
            "batch": self.work.batch,
            "prefill_tok_s": statistics.median(self.prefill),
            "decode_tok_s": statistics.median(self.decode),
            "prefill_samples_tok_s": self.prefill,
            "decode_samples_tok_s": self.decode,
        }

    def as_text(self) -> str:
        together = f", {self.work.batch} together" if self.work.batch > 1 else ""
        return "\n".join(
            (
                f"{self.model} on {self.ready.device}",
                _line("prefill", f"{self.work.prompt_tokens} tokens", self.prefill),
                _line(
                    "decode",
                    f"{self.work.gen_tokens} tokens at depth {self.work.depth}{together}",
                    self.decode,
                ),
            )
        )


def _line(what: str, how: str, samples: list[float]) -> str:
    middle = statistics.median(samples)
    spread = f"{min(samples):.1f} to {max(samples):.1f} over {len(samples)}"
    return f"{what:8}{middle:10.1f} tokens/s   {how} ({spread})"


async def _measure(config: EngineConfig, work: Workload, reps: int) -> _Result:
    from localllm.cli.measure import Meter
    from localllm.engine.client import AsyncEngineClient

    engine = AsyncEngineClient(config)
    try:
        ready = await engine.start()
        meter = Meter(engine, ready.vocab_size)
        return _Result(
            model=config.model.name,
            work=work,
            ready=ready,
            prefill=await _samples(meter.prefill, work, reps),
            decode=await _samples(meter.decode, work, reps),
        )
    finally:
        await engine.close()


async def _samples(
    measure: Callable[[Workload], Awaitable[float]], work: Workload, reps: int
) -> list[float]:
    await measure(work)  # warms up
    return [await measure(work) for _ in range(reps)]
