"""localllm chat"""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli.common import (
    Backend,
    BackendName,
    ContextSize,
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
    OptionalModelArgument,
    PipelineParallelSize,
    TensorParallelSize,
    Threads,
    errors_in_one_line,
    find_model,
    follow_rank_0,
    log_to_stderr,
)
from localllm.config import EngineConfig


def chat(
    model: OptionalModelArgument = None,
    system: Annotated[
        str | None, typer.Option(help="Instructions for the model, before the conversation.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="How freely to choose words; 0 takes the likeliest.")
    ] = 0.7,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes the same conversation give the same answers.")
    ] = None,
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
    ctx_size: ContextSize = None,
    debug: Debug = False,
) -> None:
    """Talk to a model in the terminal."""
    with errors_in_one_line(debug):
        from localllm.cli.conversation import open_conversation
        from localllm.cli.terminal import talk
        from localllm.sampling_params import SamplingParams

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
            ctx_size=ctx_size,
            max_num_seqs=1,
        )
        follow_rank_0(config)
        params = SamplingParams(temperature=temperature, seed=seed)
        with open_conversation(config, params, system) as conversation:
            talk(conversation)
