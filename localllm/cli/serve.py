"""localllm serve"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
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
    size_option,
)
from localllm.config import EngineConfig, HttpConfig, ServerConfig, config_hash

logger = logging.getLogger("localllm.cli")


def serve(
    model: OptionalModelArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8080,
    alias: Annotated[
        str | None,
        typer.Option(help="Name of the model in the API. Default: the file's name."),
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
    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most answers written at the same time.")
    ] = 16,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens computed in one step. Fewer: running answers flow more evenly while "
            "a long prompt is read. More: the prompt is read faster.",
        ),
    ] = 512,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Memory for the context of all conversations, such as 48MB or 2GiB. "
            "Default: half of what is free.",
        ),
    ] = None,
    no_prefix_cache: Annotated[
        bool,
        typer.Option("--no-prefix-cache", help="Compute every prompt from its first token again."),
    ] = False,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long open answers may still take at shutdown."
        ),
    ] = 30.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LOCALLLM_API_KEY",
            metavar="KEY",
            help="Answer only those who send this key. Repeatable. The environment variable keeps "
            "it out of the list of processes.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys with names, traffic classes and limits, as TOML: [\\[key]] tables with "
            "name, key or sha256, class, requests_per_minute, max_concurrent.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let other machines in without a key."),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin use the server, such as https://chat.example. "
            "Repeatable; * is any. Pages of this machine may without.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name that requests may give this machine while it listens on localhost. "
            "Repeatable; * is any.",
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve HTTPS with this certificate (chain), as PEM."),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's private key, as PEM.")
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Most requests that wait while --max-num-seqs others are answered. More are "
            "refused with 429.",
        ),
    ] = 128,
    queue_timeout: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Longest wait for the first step, then 503; 0: no limit."
        ),
    ] = 300.0,
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Longest time for a whole answer; 0: no limit."
        ),
    ] = 3600.0,
    max_body_size: Annotated[
        int,
        typer.Option(
            parser=size_option, metavar="SIZE", help="Longest request body; more is refused unread."
        ),
    ] = 16 * 2**20,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP: an OpenAI-compatible API, and a chat page at /."""
    with errors_in_one_line(debug):
        path = find_model(model)
        log_to_stderr(debug)
        engine = EngineConfig(
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
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            prefix_cache=not no_prefix_cache,
        )
        follow_rank_0(engine)
        http = HttpConfig(
            host=host,
            port=port,
            api_keys=tuple(api_key or ()),
            api_key_file=api_key_file,
            insecure=insecure,
            cors_origins=tuple(cors_origin or ()),
            allowed_hosts=tuple(allowed_host or ()),
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            max_queue=max_queue,
            queue_timeout=queue_timeout or None,
            request_timeout=request_timeout or None,
            max_body_size=max_body_size,
            drain_seconds=drain_seconds,
        )
        asyncio.run(_serve(ServerConfig(engine=engine, http=http, alias=alias)))


async def _serve(config: ServerConfig) -> None:
    from localllm.server.auth import load_keys
    from localllm.server.listen import bind, check_exposure, url_of

    http = config.http
    keys = load_keys(http.api_keys, http.api_key_file)
    listener = bind(http.host, http.port)
    check_exposure(listener, has_keys=bool(keys), insecure=http.insecure)
    url = url_of(listener, "https" if http.ssl_certfile else "http")
    logger.info("Loading %s; %s answers as soon as it is ready", config.engine.model.name, url)

    from localllm.engine.client import AsyncEngineClient
    from localllm.server.rehearsal import rehearse
    from localllm.server.run import serve
    from localllm.server.served_model import ServedModel, load_served_model
    from localllm.server.service import Service

    engine = AsyncEngineClient(config.engine)

    def load_model() -> ServedModel:
        return rehearse(load_served_model(config.engine.model, config.alias))

    service = Service(engine, load_model, config_hash(config.engine))

    def announce() -> None:
        ready = engine.ready
        assert ready is not None
        print(
            f"Ready: {service.model().id} on {ready.device}, context of {ready.context:,} tokens\n"
            f"{url} has a chat page, {url}/v1 is the API; Ctrl-C stops",
            flush=True,
        )

    await serve(service, listener, announce, http, keys, config.engine.max_num_seqs)
