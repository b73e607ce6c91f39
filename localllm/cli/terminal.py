"""A conversation in the terminal."""

from __future__ import annotations

import sys

from localllm.cli.conversation import Conversation
from localllm.errors import RequestError

_COMMANDS = "/clear forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def talk(conversation: Conversation) -> None:
    """Reads lines and prints answers until the user leaves."""
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
                print_answer(conversation, message)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def print_answer(conversation: Conversation, message: str) -> None:
    """As it comes. Ctrl-C stops it; a message that cannot be answered is told why."""
    try:
        for text in conversation.answer(message):
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        print(f"{error} (/clear starts anew)")
