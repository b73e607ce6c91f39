"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from localllm.cli.bench import bench
from localllm.cli.chat import chat
from localllm.cli.info import info
from localllm.cli.pull import pull
from localllm.cli.serve import serve

app = typer.Typer(
    name="localllm",
    help="Run a GGUF language model on this machine, behind an OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, chat, bench, info, pull):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"localllm {importlib.metadata.version('localllm')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run a GGUF language model on this machine, behind an OpenAI-compatible endpoint."""


def main() -> None:
    app()
