"""The server as a process: its port, its signals, its end. The engine is a fake."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from localllm.errors import LocalLLMError
from localllm.server.listen import bind, url_of
from tests.helpers import ROOT
from tests.server.fakes import first_event

HANG = 60

# A server whose engine stops after two tokens, until a line comes on standard input.
PROGRAM = """
import asyncio, sys, threading
from tests.helpers import tokenizer_cases
from tests.server.fakes import FakeEngine
from localllm.config import HttpConfig
from localllm.server import wire
from localllm.server.listen import bind, url_of
from localllm.server.run import serve
from localllm.server.served_model import load_served_model
from localllm.server.service import Service

async def main():
    wire.HEAD_SECONDS = float(sys.argv[2])
    (case,) = tokenizer_cases("gpt-2")
    model = load_served_model(case.gguf)
    engine = FakeEngine(model.tokenizer, "one two three four")
    engine.hold_after = 2
    loop = asyncio.get_running_loop()
    def wait():
        sys.stdin.readline()
        loop.call_soon_threadsafe(engine.release)
    threading.Thread(target=wait, daemon=True).start()
    listener = bind("127.0.0.1", 0)
    await serve(Service(engine, lambda: model), listener,
                lambda: print(url_of(listener), flush=True),
                HttpConfig(drain_seconds=float(sys.argv[1])))
    assert engine.closed
    print("clean end", flush=True)

asyncio.run(main())
"""


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait(self) -> tuple[int, str]:
        """Exit status, and what was printed since it was ready."""
        out, _ = self.process.communicate(timeout=HANG)
        return self.process.returncode, out


@contextmanager
def server(drain_seconds: float = HANG, head_seconds: float = HANG) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_seconds), str(head_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def open_stream(url: str) -> Iterator[tuple[Callable[[], str], Callable[[], str]]]:
    """A stream that has begun: (the first event, all the rest)."""
    body = {"prompt": "Hello", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG) as answer:
        lines = answer.iter_lines()
        first = first_event(lines)
        yield (lambda: first), (lambda: "\n".join(lines))


def test_sigterm_lets_open_requests_finish_and_refuses_new_ones() -> None:
    with server() as running, open_stream(running.url) as (first, rest):
        assert json.loads(first())["choices"][0]["text"] == "one"
        running.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{running.url}/health").json()["status"] != "draining":
            pass
        refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert running.process.poll() is None
        running.release()
        text = rest()
        assert '"text":" four"' in text
        assert text.rstrip().endswith("data: [DONE]")
        assert running.wait() == (0, "clean end\n")


def test_what_does_not_finish_in_time_ends_with_an_error() -> None:
    with server(drain_seconds=0.2) as running, open_stream(running.url) as (_, rest):
        running.process.send_signal(signal.SIGTERM)
        assert '"error"' in rest()
        assert running.wait() == (0, "clean end\n")


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,) * 2])
def test_a_second_signal_ends_at_once(signals: tuple[signal.Signals, signal.Signals]) -> None:
    with server() as running, open_stream(running.url) as (_, rest):
        running.process.send_signal(signals[0])
        while httpx.get(f"{running.url}/health").json()["status"] != "draining":
            pass
        running.process.send_signal(signals[1])
        with pytest.raises(httpx.RemoteProtocolError):
            rest()
        assert running.wait() == (0, "clean end\n")


def test_an_idle_server_ends_at_the_first_signal() -> None:
    with server() as running:
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == (0, "clean end\n")


def test_a_client_that_leaves_over_a_socket_frees_its_sequence() -> None:
    with server() as running:
        with open_stream(running.url):
            assert httpx.get(f"{running.url}/health").json()["running"] == 1
        while httpx.get(f"{running.url}/health").json()["running"]:
            pass


def exchange(url: str, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer to some bytes, after which the server hangs up."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as line:
        line.sendall(sent)
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: req_" in head
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a Host
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: many\r\n\r\n",
    ],
    ids=["nonsense", "no host", "a length that is none"],
)
def test_what_is_no_http_has_the_envelope_too(sent: bytes) -> None:
    with server() as running:
        status, error = exchange(running.url, sent)
        assert (status, error["code"]) == (400, "invalid_http")
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_headers_that_do_not_come() -> None:
    with server(head_seconds=0.2) as running:
        for sent in (b"", b"GET /health HTTP/1.1\r\nhost: loc"):
            assert exchange(running.url, sent)[1]["code"] == "head_timeout"
        with httpx.Client(base_url=running.url) as client:  # an idle connection is no such thing
            assert client.get("/health").status_code == 200
            time.sleep(0.5)
            assert client.get("/health").status_code == 200


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(LocalLLMError, match=f"Port {port} on 127.0.0.1 is already in use"):
            bind("127.0.0.1", port)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(LocalLLMError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            listener = bind("::1", 0)
        except LocalLLMError:
            pytest.skip("no IPv6 on this machine")
        with listener:
            assert url_of(listener).startswith("http://[::1]:")
