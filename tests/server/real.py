"""`localllm serve` as a process, with a real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.helpers import ROOT

HANG = 120
MAX_TOKENS = 12


class RealServer:
    """A running server, once it is ready. `log` is all that it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait()
        match = re.search(r"^(https?://\S+) has a chat page", "".join(self.log), re.MULTILINE)
        assert match, f"the server ended: {''.join(self.log)}"
        self.url = match[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.log.append(line)
                if "has a chat page" in line:
                    self._ready.set()
        self._ready.set()

    def health(self) -> dict[str, Any]:
        report: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=HANG).json()
        return report

    def engine_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "localllm.engine.process" in child.cmdline()]
        return engine


@contextmanager
def real_server(model: Path, *options: str) -> Iterator[RealServer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "serve", str(model), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        yield RealServer(process)
    finally:
        process.kill()
        process.wait()  # its output ends with it, and so does the thread that reads it


def complete(server: RealServer, **fields: Any) -> str:
    body = {"prompt": "abc", "max_tokens": MAX_TOKENS, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


def streamed(server: RealServer, **fields: Any) -> str:
    """The text of all events; else like `complete`."""
    body = {"prompt": "abc", "max_tokens": MAX_TOKENS, "stream": True, **fields}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        for line in filter(None, answer.iter_lines()):
            if (data := line.removeprefix("data: ")) != "[DONE]":
                text += "".join(c["text"] for c in json.loads(data)["choices"])
    return text
