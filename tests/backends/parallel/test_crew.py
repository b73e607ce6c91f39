"""Rank 0's hold on the others, with ranks that are ends of lines in this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from localllm.backends.parallel.communicator import UnreachableError
from localllm.backends.parallel.crew import Crew
from localllm.backends.parallel.links import Link
from localllm.backends.parallel.messages import Done, Failed, Join, Run, Stop, TellMemory
from localllm.errors import DeviceOutOfMemoryError, EngineError, GGUFError

HANG = 60.0
pytestmark = pytest.mark.timeout(120)


class Fakes:
    """A crew of two ranks. `ended` is set when the crew would end this process, `why` says why."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.ends: list[Connection[Any, Any]] = [Connection(b.detach()) for _, b in pairs]
        links = [Link(i + 1, Connection(a.detach()), pid=40 + i) for i, (a, _) in enumerate(pairs)]
        self.ended = threading.Event()
        self.why = ""
        self.crew = Crew(links, self._end)

    def _end(self, why: str) -> None:
        self.why = why
        self.ended.set()


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    made = Fakes()
    yield made
    made.crew.close()
    for end in made.ends:
        end.close()


def test_orders_reach_all_and_answers_come_in_rank_order(fakes: Fakes) -> None:
    fakes.crew.tell(Join())
    assert [end.recv() for end in fakes.ends] == [Join(), Join()]
    fakes.crew.tell_each([Run(b"1"), Run(b"2")])
    assert [end.recv() for end in fakes.ends] == [Run(b"1"), Run(b"2")]
    for number, end in reversed(list(enumerate(fakes.ends))):
        end.send(Done(number))
    assert fakes.crew.answers() == [0, 1]


def test_the_end_is_told(fakes: Fakes) -> None:
    fakes.crew.close()
    assert [end.recv() for end in fakes.ends] == [Stop(), Stop()]
    assert not fakes.ended.is_set()


def test_who_waits_for_an_answer_hears_of_a_loss(fakes: Fakes) -> None:
    fakes.crew.tell(TellMemory())
    fakes.ends[1].close()
    with pytest.raises(EngineError, match=r"^rank 2 \(pid 41\) is gone$"):
        fakes.crew.answers()
    with pytest.raises(EngineError, match="rank 2"):
        fakes.crew.tell(TellMemory())
    assert not fakes.ended.is_set(), "it was heard"


def test_what_a_rank_said_last_is_raised_here(fakes: Fakes) -> None:
    fakes.ends[0].send(Failed.of(GGUFError("the file is broken")))
    with pytest.raises(GGUFError, match=r"^rank 1 \(pid 40\): the file is broken$"):
        fakes.crew.answers()


def test_the_first_to_die_is_named_and_not_who_failed_for_it(fakes: Fakes) -> None:
    fakes.ends[0].send(Failed.of(RuntimeError("connection closed by peer")))
    fakes.ends[1].close()
    with pytest.raises(EngineError, match=r"^rank 2 \(pid 41\) is gone$"):
        fakes.crew.answers()


def test_a_collective_that_fails_is_explained(fakes: Fakes) -> None:
    fakes.ends[0].close()
    with pytest.raises(EngineError, match=r"^rank 1 .* is gone$") as caught, fakes.crew.working():
        raise RuntimeError("connection closed by peer")
    assert "closed by peer" in str(caught.value.__cause__)


def test_without_a_loss_an_error_is_what_it_is(fakes: Fakes) -> None:
    with pytest.raises(RuntimeError, match="timed out"), fakes.crew.working():
        raise RuntimeError("timed out")


def test_ranks_that_do_not_reach_each_other_are_an_engines_error(fakes: Fakes) -> None:
    words = "the ranks do not reach each other: timed out"
    with pytest.raises(EngineError, match=words), fakes.crew.working():
        raise UnreachableError("timed out")


def test_memory_that_one_rank_lacks_ends_the_step_for_all(fakes: Fakes) -> None:
    with pytest.raises(EngineError, match="rank 0: no memory"), fakes.crew.working():
        raise DeviceOutOfMemoryError("no memory")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "stuck"])
def test_who_does_not_hear_of_a_loss_is_ended(
    fakes: Fakes, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.backends.parallel.crew._STUCK_SECONDS", 0.5)
    with fakes.crew.working(done=not busy):
        pass
    fakes.ends[0].close()
    assert fakes.ended.wait(HANG)
    assert fakes.why == "rank 1 (pid 40) is gone"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was ended by SIGTERM"),
        ("raise SystemExit(3)", "ended with status 3"),
    ],
)
def test_how_a_process_ended(code: str, words: str) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    popen = subprocess.Popen([sys.executable, "-c", code])
    link = Link(1, Connection(ours.detach()), popen)
    wait_for(lambda: popen.poll() is not None)
    assert link.how_it_ended() == f"rank 1 (pid {popen.pid}) {words}"
    link.end(0)


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(HANG * 50)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it never happened")
