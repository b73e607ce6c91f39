"""Ranks as torchrun starts them: `localllm serve` with its variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import FIXTURES, ROOT

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
ON_CPU = ("--backend", "torch", "--device", "cpu", "--threads", "1")
TWO = (*ON_CPU, "--tensor-parallel-size", "2")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def started_by_hand(
    rank: int, port: int, model: Path = TINY, options: tuple[str, ...] = TWO, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """One of two ranks; afterwards it is gone. `variables` beside or instead of torchrun's."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "serve", str(model), "--port", "0", *options],
        env=os.environ | environment | variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
