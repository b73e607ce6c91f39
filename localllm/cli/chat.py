"""localllm chat"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.common import (
    Backend,
    BackendName,
    ContextSize,
    Debug,
    Isa,
    IsaName,
    OptionalModelArgument,
    Threads,
    errors_in_one_line,
    find_model,
    log_to_stderr,
)
from localllm.config import EngineConfig
from localllm.errors import RequestError

if TYPE_CHECKING:
    from localllm.cli.conversation import Conversation

_COMMANDS = "/clear forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


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
    isa: Isa = IsaName.AUTO,
    ctx_size: ContextSize = None,
    debug: Debug = False,
) -> None:
    """Talk to a model in the terminal."""
    with errors_in_one_line(debug):
        from localllm.cli.conversation import open_conversation
        from localllm.sampling_params import SamplingParams

        log_to_stderr(debug)
        config = EngineConfig(
            model=find_model(model),
            backend=backend.value,
            threads=threads,
            isa=isa.value,
            ctx_size=ctx_size,
            max_num_seqs=1,
        )
        params = SamplingParams(temperature=temperature, seed=seed)
        with open_conversation(config, params, system) as conversation:
            _talk(conversation)


def _talk(conversation: Conversation) -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() a history and editing

        print(f"{conversation.model_id}: {_COMMANDS}")
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/clear":
                conversation.clear()
            case command if command.startswith("/"):
                print(_COMMANDS)
            case message:
                _print_answer(conversation, message)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _print_answer(conversation: Conversation, message: str) -> None:
    try:
        for text in conversation.answer(message):
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        print(f"{error} (/clear starts anew)")
