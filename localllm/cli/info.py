"""localllm info"""

from __future__ import annotations

from localllm.cli.common import Debug, ModelArgument, errors_in_one_line, find_model


def info(model: ModelArgument, debug: Debug = False) -> None:
    """Tell what is in a model file, and what it will need."""
    with errors_in_one_line(debug):
        from localllm.cli.describe import describe

        for name, value in describe(find_model(model)):
            print(f"{name:<16} {value}")
