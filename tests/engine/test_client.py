"""Clients of a real engine process: answers, cancels, crashes, hangs and the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from localllm.engine.client import AsyncEngineClient, EngineClient, Inbox
from localllm.engine.loader import load_engine
from localllm.engine.messages import SequenceNews, Submit
from localllm.errors import (
    ContextLengthError,
    EngineError,
    GGUFError,
    InsufficientMemoryError,
    RequestError,
)
from tests.engine.fakes import run, tokens_of
from tests.engine.processes import (
    PATIENCE,
    config,
    engine_processes,
    is_gone,
    long_request,
    wait_until,
)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient(config())
    client.start()
    client.wait_ready()
    yield client
    client.close()


def collect(inbox: Inbox) -> list[SequenceNews]:
    news: list[SequenceNews] = []
    while not news or news[-1].finish_reason is None:
        news.append(inbox.get(timeout=PATIENCE))
    return news


def answer(client: EngineClient, request: Submit) -> list[int]:
    inbox: Inbox = SimpleQueue()
    client.submit(request, inbox)
    return tokens_of(collect(inbox))


def test_the_process_answers_as_an_engine_in_this_process_does(client: EngineClient) -> None:
    core = load_engine(config(), lambda _: None)
    request = long_request("a", max_tokens=12)
    expected = tokens_of(run(core, request)["a"])
    core.close()
    assert answer(client, request) == expected
    assert len(expected) == 12
    assert client.stats.generated_tokens == 12


def test_prompt_logits_cross_the_line(client: EngineClient) -> None:
    inbox: Inbox = SimpleQueue()
    client.submit(replace(long_request("l"), prompt_logits=True), inbox)
    (news,) = collect(inbox)
    assert news.logits is not None
    assert news.logits.shape == (3, 128)


def test_a_cancelled_sequence_ends_and_frees_its_memory(client: EngineClient) -> None:
    inbox: Inbox = SimpleQueue()
    client.submit(long_request("a"), inbox)
    inbox.get(timeout=PATIENCE)
    client.cancel("a")
    client.cancel("unknown")
    assert collect(inbox)[-1].finish_reason == "cancelled"
    assert client.stats.kv_usage == 0.0
    client.cancel("a")
    assert answer(client, long_request("a", max_tokens=1))


def test_what_the_model_cannot_serve_is_refused_at_once(client: EngineClient) -> None:
    inbox: Inbox = SimpleQueue()
    with pytest.raises(ContextLengthError, match="exceeds the context window"):
        client.submit(replace(long_request("a"), prompt=(1,) * 4000), inbox)
    with pytest.raises(RequestError, match="outside"):
        client.submit(replace(long_request("a"), prompt=(128,)), inbox)
    client.submit(long_request("a"), inbox)
    with pytest.raises(ValueError, match="open already"):
        client.submit(long_request("a"), SimpleQueue())


def test_when_the_process_is_killed_open_sequences_fail_and_the_next_are_served(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    (process,) = engine_processes()
    inbox: Inbox = SimpleQueue()
    client.submit(long_request("a"), inbox)
    client.submit(long_request("b"), inbox)
    inbox.get(timeout=PATIENCE)
    process.kill()
    ended: dict[str, SequenceNews] = {}
    while len(ended) < 2:
        news = inbox.get(timeout=PATIENCE)
        if news.finish_reason:
            ended[news.sequence_id] = news
    assert {news.finish_reason for news in ended.values()} == {"error"}
    assert f"pid {process.pid}) was ended by SIGKILL" in (ended["a"].error or "")
    assert "2 open sequences are lost; starting it again" in caplog.text
    with pytest.raises(EngineError, match="loading"):
        client.submit(long_request("c"), inbox)
    wait_until(lambda: client._supervisor.healthy)
    (successor,) = engine_processes()
    assert successor.pid != process.pid
    assert client.stats.generated_tokens == 0, "what crashed the engine is not run again"
    assert len(answer(client, long_request("d", max_tokens=3))) == 3


def test_after_three_crashes_in_a_minute_it_gives_up(client: EngineClient) -> None:
    for _ in range(3):
        wait_until(lambda: client._supervisor.healthy)
        engine_processes()[0].kill()
        wait_until(lambda: not client._supervisor.healthy)
    wait_until(lambda: not client._supervisor._thread.is_alive())
    why = "third time within a minute; it is not started again"
    assert why in (client._supervisor.failed or "")
    with pytest.raises(EngineError, match=why):
        client.submit(long_request("a"), SimpleQueue())
    assert not engine_processes()


def test_a_hung_engine_counts_as_dead() -> None:
    client = EngineClient(config(), hang_seconds=1.5)
    client.start()
    client.wait_ready()
    inbox: Inbox = SimpleQueue()
    client.submit(long_request("a"), inbox)
    inbox.get(timeout=PATIENCE)
    (process,) = engine_processes()
    process.send_signal(signal.SIGSTOP)
    assert "did not answer for 1.5 s" in (collect(inbox)[-1].error or "")
    assert is_gone(process)
    wait_until(lambda: client._supervisor.healthy)
    client.close()


def test_an_idle_engine_uses_no_cpu_and_its_heart_beats(client: EngineClient) -> None:
    answer(client, long_request("a", max_tokens=2))
    (process,) = engine_processes()
    before = process.cpu_times()
    for _ in range(3):
        age = client._supervisor.heartbeat_age
        wait_until(lambda: client._supervisor.heartbeat_age < age)  # noqa: B023
        wait_until(lambda: client._supervisor.heartbeat_age > 0.5)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.15
    assert client._supervisor.healthy


def test_signals_for_the_parent_do_not_end_the_engine(client: EngineClient) -> None:
    (process,) = engine_processes()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert answer(client, long_request("a", max_tokens=2))
    assert not is_gone(process)


def test_closing_ends_the_process_and_what_is_open(client: EngineClient) -> None:
    (process,) = engine_processes()
    inbox: Inbox = SimpleQueue()
    client.submit(long_request("a"), inbox)
    client.close()
    assert is_gone(process)
    assert collect(inbox)[-1].error == "The engine is closed"
    with pytest.raises(EngineError, match="closed"):
        client.submit(long_request("b"), inbox)
    client.close()


def test_a_client_that_is_collected_takes_its_process_along() -> None:
    client = EngineClient(config())
    client.start()
    client.wait_ready()
    (process,) = engine_processes()
    del client
    gc.collect()
    assert is_gone(process)


def test_faults_of_the_model_keep_their_class(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF then nothing")
    for wrong, error in (
        (config(broken), GGUFError),
        (config(tmp_path / "absent.gguf"), GGUFError),
        (replace(config(), kv_cache_memory=1000), InsufficientMemoryError),
        (replace(config(), backend="abacus"), RequestError),
    ):
        client = EngineClient(wrong)
        client.start()
        with pytest.raises(error):
            client.wait_ready()
        client.close()
    assert not engine_processes()


def test_a_process_that_dies_while_it_loads_is_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    client = EngineClient(config())
    client.start()
    wait_until(lambda: bool(engine_processes()))
    engine_processes()[0].kill()
    with pytest.raises(EngineError, match=r"SIGKILL.* while it loaded the model"):
        client.wait_ready()
    assert not engine_processes()


def test_from_an_event_loop() -> None:
    async def scenario() -> None:
        client = AsyncEngineClient(config())
        assert (client.ready, client.healthy) == (None, False)
        with pytest.raises(EngineError, match="loading"):
            client.submit(long_request("early"))
        ready = await client.start()
        assert ready == client.ready
        assert (ready.backend, ready.context, ready.vocab_size) == ("reference", 4000, 128)
        assert _is_healthy(client)
        one, two = await asyncio.gather(
            _tokens(client, long_request("one", max_tokens=9)),
            _tokens(client, long_request("two", max_tokens=4)),
        )
        assert len(one) == 9
        assert two == one[:4]
        assert client.stats.generated_tokens == 13
        assert client.heartbeat_age < PATIENCE
        await _cancel_in_the_middle(client)
        await _crash_in_the_middle(client)
        last = client.submit(long_request("last"))
        await anext(last)
        await client.close()
        with pytest.raises(EngineError):
            async for _ in last:
                pass
        assert not _is_healthy(client)
        assert client.failed == "The engine is closed"
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))
    assert not engine_processes()


def _is_healthy(client: AsyncEngineClient) -> bool:
    return client.healthy


async def _tokens(client: AsyncEngineClient, request: Submit) -> list[int]:
    return tokens_of([news async for news in client.submit(request)])


async def _cancel_in_the_middle(client: AsyncEngineClient) -> None:
    stream = client.submit(long_request("cancelled"))
    await anext(stream)
    client.cancel("cancelled")
    reasons = [news.finish_reason async for news in stream]
    assert reasons[-1] == "cancelled"
    assert client.stats.running == 0


async def _crash_in_the_middle(client: AsyncEngineClient) -> None:
    stream = client.submit(long_request("crashed"))
    await anext(stream)
    engine_processes()[0].kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        async for _ in stream:
            pass
    assert not _is_healthy(client)
    while not _is_healthy(client):
        await asyncio.sleep(0.02)
    assert len(await _tokens(client, long_request("after", max_tokens=2))) == 2


def test_closing_while_it_loads() -> None:
    async def scenario() -> None:
        client = AsyncEngineClient(config())
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineError):
            await starting

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    assert not engine_processes()


def test_giving_up_on_the_start_is_no_error() -> None:
    reports: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        client = AsyncEngineClient(config())
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        starting.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    gc.collect()  # asyncio reports when it frees the future
    assert not reports


@pytest.mark.usefixtures("client")
def test_a_signal_to_the_parents_group_does_not_reach_the_engine() -> None:
    (process,) = engine_processes()
    assert os.getpgid(process.pid) != os.getpgid(0)
