"""The server with a model that is divided among processes, and what is left when one dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

pytest.importorskip("torch")

from localllm import LLM
from localllm.sampling_params import SamplingParams
from tests.helpers import ROOT
from tests.server.by_hand import TINY, TWO, free_port, started_by_hand
from tests.server.fakes import first_event
from tests.server.real import HANG, RealServer, complete, real_server, streamed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

LONG = 30  # so long that sequences grow out of a small pool
TOLD_SECONDS = 10.0  # in which an open request hears of a death


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(TINY, *TWO, "--ctx-size", "4000") as running:
        yield running


def processes(server: RealServer) -> list[psutil.Process]:
    """The engine's, and those of the other ranks."""
    engine = server.engine_process()
    return [engine, *engine.children()]


def await_health(server: RealServer, restarted: list[psutil.Process]) -> None:
    deadline = time.monotonic() + HANG
    while server.health()["status"] != "ok" or server.engine_process() in restarted:
        assert time.monotonic() < deadline, "the engine does not come back"
        time.sleep(0.1)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
def test_a_stream_is_the_whole_answer(server: RealServer, sampling: Any) -> None:
    text = streamed(server, **sampling)
    assert text
    assert text == complete(server, **sampling)


def test_a_client_that_leaves_frees_its_memory(server: RealServer) -> None:
    before = server.health()["generated_tokens"]
    body = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True, "n": 4, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        first_event(answer.iter_lines())
    while (report := server.health())["running"] or report["waiting"] or report["kv_usage"]:
        pass
    assert server.health()["generated_tokens"] - before < 4 * 900


def test_health_and_log_tell_the_ranks(server: RealServer) -> None:
    device = server.health()["device"]
    assert "on 2 ranks (tensor 2, pipeline 1) over gloo" in device
    assert device in "".join(server.log)
    assert server.health()["threads"] == 2


def test_a_grammar_holds(server: RealServer) -> None:
    assert complete(server, guided_choice=["yes", "no"], max_tokens=20) in ("yes", "no")


def test_ranks_that_were_idle_go_on(server: RealServer) -> None:
    before = complete(server, temperature=0)
    time.sleep(3)
    assert complete(server, temperature=0) == before


@pytest.mark.parametrize("victim", [1, 0], ids=["another rank", "rank 0"])
def test_a_death_in_mid_stream_is_told_and_the_engine_starts_again(
    server: RealServer, victim: int
) -> None:
    """No more than these two: an engine that dies three times within a minute stays dead."""
    lost = processes(server)
    assert len(lost) == 2
    body = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        lines = answer.iter_lines()
        first_event(lines)
        lost[victim].kill()
        killed = time.monotonic()
        *_, told = (line for line in lines if "error" in line)
    assert time.monotonic() - killed < TOLD_SECONDS
    message = json.loads(told.removeprefix("data: "))["error"]["message"]
    assert f"(pid {lost[victim].pid}) was ended by SIGKILL" in message
    assert ("rank 1" in message) == (victim == 1)
    _, alive = psutil.wait_procs(lost, timeout=HANG)
    assert not alive
    await_health(server, lost)
    assert complete(server)


def test_a_rank_that_dies_idle_is_replaced_and_all_end_with_the_server() -> None:
    with real_server(TINY, *TWO) as server:
        lost = processes(server)
        lost[1].kill()
        _, alive = psutil.wait_procs(lost, timeout=HANG)
        assert not alive
        await_health(server, lost)
        (told,) = (line for line in server.log if "starting it again" in line)
        assert f"rank 1 (pid {lost[1].pid}) was ended by SIGKILL" in told
        assert "status 70" not in "".join(server.log)
        assert complete(server)
        lost = processes(server)
        assert len(lost) == 2
        server.process.kill()
        _, alive = psutil.wait_procs(lost, timeout=HANG)
        assert not alive


def test_nothing_is_left_of_a_server_that_is_killed_while_it_loads() -> None:
    command = [sys.executable, "-m", "localllm", "serve", str(TINY), "--port", "0", *TWO]
    server = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + HANG
        while len(children := server.children(recursive=True)) < 2:
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.02)
    finally:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs(children, timeout=HANG)
    assert not alive


def test_a_rank_that_dies_while_the_first_engine_loads_ends_the_server() -> None:
    command = [sys.executable, "-m", "localllm", "serve", str(TINY), "--port", "0", *TWO]
    pipe = subprocess.PIPE
    server = psutil.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + HANG
        while len(children := server.children(recursive=True)) < 2:
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.02)
        children[-1].kill()
        output, _ = server.communicate(timeout=HANG)
    finally:
        if server.is_running():
            server.kill()
    assert server.returncode == 1
    words = f"rank 1 (pid {children[-1].pid}) was ended by SIGKILL"
    assert words in output
    assert "while it loaded the model" in output
    _, alive = psutil.wait_procs(children, timeout=HANG)
    assert not alive


def test_ranks_that_torchrun_would_start_serve_together(server: RealServer) -> None:
    port = free_port()
    with started_by_hand(0, port) as leader, started_by_hand(1, port) as follower:
        together = RealServer(leader)
        assert not together.engine_process().children(), "the other rank is there"
        assert "on 2 ranks" in together.health()["device"]
        assert complete(together, temperature=0) == complete(server, temperature=0)
        leader.send_signal(signal.SIGTERM)
        assert leader.wait(HANG) == 0
        assert follower.wait(HANG) == 0


def params_of(index: int) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=40, seed=index, max_tokens=LONG, ignore_eos=True
    )


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_the_same_bytes_under_any_load(sizes: tuple[int, int]) -> None:
    """Alone, preempted, in one step that stages cut, and from the prefix cache."""
    options: Any = {
        "backend": "torch",
        "device": "cpu",
        "threads": 1,
        "ctx_size": 256,
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
    }
    draw = np.random.default_rng(5)
    common = draw.integers(3, 120, 48).tolist()
    prompts = [
        [*common[: 16 * (i % 4)], *draw.integers(3, 120, 1 + 9 * i).tolist()] for i in range(7)
    ]
    params = [params_of(i) for i in range(len(prompts))]
    block_bytes = 65536  # of both ranks
    with LLM(TINY, kv_cache_memory=17 * block_bytes, prefix_cache=False, **options) as llm:
        alone = [llm.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
        assert llm.ready.kv_bytes == 17 * block_bytes
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert llm.stats.preemptions > 0
    with LLM(TINY, **options) as llm:
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert [g.token_ids for g in llm.generate(prompts, params)] == alone
        assert llm.stats.prefix_hits > 0
