"""localllm serve"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from localllm.cli.common import (
    Backend,
    BackendName,
    ContextSize,
    Debug,
    Isa,
    OptionalModelArgument,
    Threads,
    errors_in_one_line,
    find_model,
    log_to_stderr,
    size_option,
)
from localllm.config import EngineConfig, ServerConfig

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
    isa: Isa = "auto",
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
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP: an OpenAI-compatible API, and a chat page at /."""
    with errors_in_one_line(debug):
        path = find_model(model)
        log_to_stderr(debug)
        engine = EngineConfig(
            model=path,
            backend=backend.value,
            threads=threads,
            isa=isa,
            ctx_size=ctx_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            prefix_cache=not no_prefix_cache,
        )
        config = ServerConfig(
            engine=engine, host=host, port=port, alias=alias, drain_seconds=drain_seconds
        )
        asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    from localllm.server.listen import bind, url_of

    listener = bind(config.host, config.port)
    url = url_of(listener)
    logger.info("Loading %s; %s answers as soon as it is ready", config.engine.model.name, url)

    from localllm.engine.client import AsyncEngineClient
    from localllm.server.run import serve
    from localllm.server.served_model import load_served_model
    from localllm.server.service import Service

    engine = AsyncEngineClient(config.engine)
    service = Service(engine, lambda: load_served_model(config.engine.model, config.alias))

    def announce() -> None:
        ready = engine.ready
        assert ready is not None
        print(
            f"Ready: {service.model().id} on {ready.device}, context of {ready.context:,} tokens\n"
            f"{url} has a chat page, {url}/v1 is the API; Ctrl-C stops",
            flush=True,
        )

    await serve(service, listener, config.drain_seconds, announce)
