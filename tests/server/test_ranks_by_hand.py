"""Ranks that somebody else starts: what each is told when they do not fit together."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from tests.server.by_hand import ON_CPU, TINY, free_port, started_by_hand
from tests.server.real import HANG, RealServer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_ranks_with_other_models_are_refused_at_both_sides() -> None:
    port, other = free_port(), TINY.with_name("llama-format-q4_0.gguf")
    with (
        started_by_hand(0, port) as leader,
        started_by_hand(1, port, other) as follower,
    ):
        words = f"rank 1: {other} is not the model that rank 0 has in {TINY}"
        told, followers = leader.communicate(timeout=HANG)[0], follower.communicate(timeout=HANG)[0]
    assert (leader.returncode, follower.returncode) == (1, 1)
    assert told.splitlines()[-1] == f"localllm: {words}"
    assert followers.splitlines()[-1].endswith(words)
    assert "Traceback" not in told + followers


def test_rank_0s_options_count_and_others_are_told() -> None:
    port, stages = free_port(), (*ON_CPU, "--pipeline-parallel-size", "2", "--ctx-size", "64")
    with started_by_hand(0, port) as leader, started_by_hand(1, port, TINY, stages) as follower:
        device = RealServer(leader).health()["device"]
        assert "on 2 ranks (tensor 2, pipeline 1)" in device
        leader.terminate()
        told, _ = follower.communicate(timeout=HANG)
    warnings = [line for line in told.splitlines() if "rank 1" in line]
    assert len(warnings) == 1
    assert warnings[0].endswith(
        "rank 1 goes by rank 0's ctx_size None, not by its own 64, "
        "pipeline_parallel_size 1, not by its own 2"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_were_told_no_sizes_do_not_serve(rank: int) -> None:
    with started_by_hand(rank, free_port(), options=()) as process:
        told, _ = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert told == (
        "localllm: torchrun started 2 ranks; tensor_parallel_size 1 times "
        "pipeline_parallel_size 1 is 1\n"
    )


def test_a_port_that_rank_0_does_not_get_is_told_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started_by_hand(0, port) as leader:
            told, _ = leader.communicate(timeout=HANG)
    assert leader.returncode == 1
    assert told.splitlines()[-1] == (
        "localllm: rank 0 cannot listen at the environment variable MASTER_PORT, "
        f"{port}: Address already in use"
    )
    assert told.count(str(port)) == 1, told


def test_a_port_where_somebody_else_answers_is_told_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=answer_wrongly, args=(other,), daemon=True).start()
        with started_by_hand(1, port) as follower:
            told, _ = follower.communicate(timeout=HANG)
    assert follower.returncode == 1
    (line,) = told.splitlines()
    words = f"rank 0 is not what answers at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: "
    assert line.startswith(f"localllm: {words}")


def answer_wrongly(listener: socket.socket) -> None:
    """Until nobody comes any more."""
    listener.settimeout(HANG)
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_waited_for_is_told(rank: int) -> None:
    port = free_port()
    missing = ["rank 1 of 2", f"rank 0 at MASTER_ADDR 127.0.0.1, MASTER_PORT {port} "][rank]
    with started_by_hand(rank, port) as process:
        assert process.stdout is not None
        assert any(f"waiting for {missing}" in line for line in process.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_rank_0_ends_when_told(number: signal.Signals) -> None:
    with started_by_hand(1, free_port()) as follower:
        await_torch(follower.pid)
        follower.send_signal(number)
        told, _ = follower.communicate(timeout=HANG)
    assert follower.returncode == -number
    assert len(told.splitlines()) <= 1, told


def await_torch(pid: int) -> None:
    """Until the process has it and is idle: it waits for others."""
    process, pause = psutil.Process(pid), threading.Event()
    for _ in range(10 * HANG):
        libraries = {Path(mapped.path).name for mapped in process.memory_maps()}
        if "libtorch_python.so" in libraries and process.cpu_percent(0.5) < 5:
            return
        pause.wait(0.1)
    raise AssertionError("it never waits")
