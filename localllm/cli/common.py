"""Options, and the handling of errors, that several commands share."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from localllm.config import LEAST_CTX_SIZE, EngineConfig, parse_size
from localllm.errors import LocalLLMError, RequestError

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?:(?<!\.gguf)|:.+)")


def size_option(text: str) -> int:
    """Bytes of an option such as 48MB."""
    try:
        return parse_size(text, "size")
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


class BackendName(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    TORCH = "torch"
    REFERENCE = "reference"


class DeviceName(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class DtypeName(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KVCacheDtypeName(StrEnum):
    AUTO = "auto"
    Q8_0 = "q8_0"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .gguf file, or owner/repo:QUANT of the Hugging Face hub."
    ),
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, or owner/repo:QUANT of the Hugging Face hub. "
        "Without one: a small model that is fetched once.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads that compute. Default: one per core.", metavar="N"),
]
Backend = Annotated[
    BackendName,
    typer.Option(
        help="What computes. auto: torch on a GPU if there is one, else cpu; reference is a slow "
        "oracle."
    ),
]
Device = Annotated[
    DeviceName, typer.Option(help="Where to compute. auto: CUDA, else Apple's GPU, else the CPU.")
]
Dtype = Annotated[
    DtypeName,
    typer.Option(
        help="What torch multiplies in, and keeps keys and values in. auto: float32 on the CPU, "
        "else bfloat16."
    ),
]
KVCacheDtype = Annotated[
    KVCacheDtypeName,
    typer.Option(
        help="What torch keeps keys and values in. q8_0: 8 bits with a scale for 32 values, about "
        "half the memory of 16 bits. auto: as --dtype."
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        metavar="SHARE",
        help="Share of an NVIDIA GPU's memory that weights, buffers and contexts may fill.",
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="CUDA: faster with large batches, but an answer may then depend on who shares them.",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Devices that divide each layer among them (torch; a process for each).",
    ),
]
PipelineParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Groups of layers that compute one after another, each on devices of its own (torch).",
    ),
]
Isa = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="CPU instructions to compute with. auto: the best that this CPU has; "
        "scalar: none beyond the plain ones.",
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option(
        "--ctx-size",
        min=LEAST_CTX_SIZE,
        metavar="TOKENS",
        help="Most tokens of one conversation, prompt and answer. "
        "Default: as many as the model was trained for and memory holds.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log more; show tracebacks of errors.")]


def log_to_stderr(debug: bool) -> None:
    """What the parts of localllm log goes to the terminal, a line each."""
    origin = "%(name)s %(levelname)s " if debug else ""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {origin}%(message)s", "%H:%M:%S"))
    logger = logging.getLogger("localllm")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)


def follow_rank_0(config: EngineConfig) -> None:
    """Returns, unless torchrun started this process as another rank than 0: that ends here."""
    from localllm.backends.parallel.torchrun import Torchrun

    torchrun = Torchrun.find(config)
    if torchrun is not None and torchrun.rank > 0:
        from localllm.backends.parallel.worker import follow

        follow(torchrun, config)


@contextmanager
def errors_in_one_line(debug: bool) -> Iterator[None]:
    """Ends the program with status 1 and one line on stderr; with `debug` the traceback too."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except (LocalLLMError, OSError) as error:
        _report(error, str(error), debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        _report(error, f"internal error: {type(error).__name__}: {error}{hint}", debug)


def _report(error: Exception, message: str, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    print(f"localllm: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(1) from None


def find_model(model: str | None) -> Path:
    """The file that a MODEL argument means; fetched when it is not here."""
    from localllm import hub

    if model is None:
        return hub.ensure_default_model()
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise LocalLLMError(f"{model} is a folder; name the .gguf file in it")
    if path.exists():
        raise LocalLLMError(f"{model} is {_kind(path)}; a model is a regular file")
    if _HUB_NAME.fullmatch(model):
        return hub.pull(model)
    raise LocalLLMError(f"There is no file {model}")


def _kind(path: Path) -> str:
    """What stands in a file's place."""
    kinds = {"a named pipe": path.is_fifo, "a socket": path.is_socket}
    return next((kind for kind, is_one in kinds.items() if is_one()), "a device")
