"""localllm pull"""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli.common import Debug, errors_in_one_line


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/REPO:QUANT", help="For example bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"
        ),
    ],
    debug: Debug = False,
) -> None:
    """Fetch a model from the Hugging Face hub and print where its file is."""
    with errors_in_one_line(debug):
        from localllm import hub

        print(hub.pull(model))
