"""Ranks that somebody else has started meet: here threads of one process."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from localllm.backends.parallel import waiting
from localllm.backends.parallel.arrivals import arrive, await_ranks
from localllm.backends.parallel.stores import Store, await_key, found_store, store_of
from localllm.backends.parallel.torchrun import Torchrun
from localllm.errors import EngineError, RequestError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

HANG = 60


def started(rank: int, port: int, world_size: int = 3) -> Torchrun:
    return Torchrun(rank, world_size, rank, world_size, "127.0.0.1", port)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "PATIENCE", timedelta(seconds=2))


def test_ranks_meet_in_whatever_order_they_come() -> None:
    port = free_port()

    def follow(rank: int) -> str:
        torchrun = started(rank, port)
        with arrive(store_of(torchrun), torchrun) as line:
            text: str = line.recv()
            return text

    with ThreadPoolExecutor() as threads:
        told = [threads.submit(follow, rank) for rank in (2, 1)]
        links = await_ranks(store_of(started(0, port)), 3)
        for link in links:
            link.connection.send(f"you are {link.rank}")
        assert [one.result(HANG) for one in told] == ["you are 2", "you are 1"]
        for link in links:
            link.connection.close()


def test_a_rank_of_other_ranks_is_refused() -> None:
    store = found_store(2)
    with ThreadPoolExecutor() as threads:
        waiting_one = threads.submit(await_ranks, store, 2)
        with pytest.raises(RequestError, match="WORLD_SIZE is 4, and rank 0's is 2"):
            arrive(store, started(3, store.port, world_size=4))
        assert not waiting_one.done()
        with arrive(store, started(1, store.port, world_size=2)):
            (link,) = waiting_one.result(HANG)
            link.connection.close()


@pytest.mark.usefixtures("impatient")
def test_who_does_not_come_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(EngineError, match="ranks 1, 2 of 3 has"):
        await_ranks(found_store(3), 3)
    assert caplog.messages == ["waiting for ranks 1, 2 of 3"]


@pytest.mark.usefixtures("impatient")
def test_rank_0_that_does_not_come_is_named(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    words = f"rank 0 at MASTER_ADDR 127.0.0.1, MASTER_PORT {port} (Connection refused)"
    with caplog.at_level(logging.WARNING), pytest.raises(EngineError) as caught:
        store_of(started(1, port))
    assert caplog.messages == [f"waiting for {words}"]
    assert str(caught.value).startswith(f"{words} has not come in")
    caplog.clear()
    with pytest.raises(EngineError, match=r"^rank 0 has not come in"):
        await_key(found_store(2), "nothing", "rank 0")
    assert caplog.messages == ["waiting for rank 0"]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError) as caught:
            store_of(started(0, port))
    assert str(caught.value) == (
        f"rank 0 cannot listen at the environment variable MASTER_PORT, {port}: "
        "Address already in use"
    )


def test_a_store_that_ends_is_told_in_a_line() -> None:
    port = free_port()
    founded: list[Store] = [store_of(started(0, port))]
    store = store_of(started(1, port))
    founded.clear()
    with pytest.raises(EngineError, match=r"^rank 0 is gone: .+$") as caught:
        await_key(store, "nothing", "rank 0")
    assert "\n" not in str(caught.value)
