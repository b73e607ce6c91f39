"""Rank 0's hold on the other ranks: orders, answers, and what happens when one dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from localllm.backends.parallel.communicator import UnreachableError
from localllm.backends.parallel.links import Link
from localllm.backends.parallel.messages import Done, Failed, Order, Stop
from localllm.child_process import end_process
from localllm.errors import DeviceOutOfMemoryError, EngineError, LocalLLMError

_SETTLE_SECONDS = 0.3  # in which ranks that end because of the first one are told from it
_TELL_SECONDS = 2.0  # between an operation that fails and the news of who died
_STUCK_SECONDS = 5.0
_STOP_SECONDS = 2.0


class Crew:
    """Orders are given by one thread; another one listens to all ranks.

    When a rank ends, what the ordering thread does with the others fails: it is to ask `loss` why
    within 5 s. If it does not, since it hangs in an operation with that rank, or has nothing to do,
    then `end` ends this process, and with it all ranks.
    """

    def __init__(self, links: Sequence[Link], end: Callable[[str], None] = end_process) -> None:
        self.links = list(links)
        self._end = end
        self._closing = False
        self._busy = True  # from an order until it is done; at first until the ranks are there
        self._loss: LocalLLMError | None = None
        self._lost = threading.Event()
        self._heard = threading.Event()  # of the loss, by who gives the orders
        self._wake, self._woken = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._listen, name="localllm-ranks", daemon=True)
        self._thread.start()

    def tell(self, order: Order) -> None:
        """The same to all; raises the loss, if there is one."""
        packed = bytes(ForkingPickler.dumps(order))
        self._send([packed] * len(self.links))

    def tell_each(self, orders: Sequence[Order]) -> None:
        self._send([bytes(ForkingPickler.dumps(order)) for order in orders])

    def answers(self) -> list[Any]:
        """Of all ranks, to the order that has no answer yet. Waits; raises the loss."""
        found = []
        for link in self.links:
            answer = link.answers.get()
            if answer is None:
                raise self._told_loss()
            found.append(answer.value)
        self._busy = False
        return found

    @contextmanager
    def working(self, *, done: bool = True) -> Iterator[None]:
        """While ranks work together; they still do after it unless that ends what they `done`.

        Where they do not, that becomes an EngineError, the loss if there is one.
        """
        self._busy = True
        try:
            yield
        except DeviceOutOfMemoryError as error:  # the others are in the midst of the step
            raise EngineError(f"rank 0: {error}") from error
        except RuntimeError as error:
            if (loss := self.loss()) is not None:
                raise loss from error
            if isinstance(error, UnreachableError):
                raise EngineError(f"the ranks do not reach each other: {error}") from error
            raise
        self._busy = not done

    def loss(self) -> LocalLLMError | None:
        """Why the ranks cannot go on; waits a moment for the news."""
        return self._told_loss() if self._lost.wait(_TELL_SECONDS) else None

    def close(self) -> None:
        """Ends the other ranks."""
        if self._closing:
            return
        self._closing = True
        self._heard.set()
        if not self._lost.is_set():
            for link in self.links:
                with suppress(OSError):  # it is gone already
                    link.connection.send(Stop())
        self._woken.send(None)
        self._thread.join()
        for link in self.links:
            link.end(0 if self._lost.is_set() else _STOP_SECONDS)
        self._wake.close()
        self._woken.close()

    def _send(self, packed: Sequence[bytes]) -> None:
        self._busy = True
        if self._lost.is_set():
            raise self._told_loss()
        try:
            for link, message in zip(self.links, packed, strict=True):
                link.connection.send_bytes(message)
        except OSError as error:
            if (loss := self.loss()) is not None:
                raise loss from error
            raise EngineError(f"a rank cannot be told what to do: {error}") from error

    def _told_loss(self) -> LocalLLMError:
        self._heard.set()
        assert self._loss is not None
        return self._loss

    def _listen(self) -> None:
        while not self._closing:
            for link in _ready(self.links, None, self._wake):
                answer = _received(link)
                if isinstance(answer, Done):
                    link.answers.put(answer)
                else:
                    self._lose({link.rank: answer})
                    return

    def _lose(self, ended: dict[int, Failed | None]) -> None:
        """`ended`: the ranks that are lost, with what they said last."""
        self._settle(ended)
        # One that said nothing goes before one that failed because of it.
        rank = min(ended, key=lambda rank: (ended[rank] is not None, rank))
        link, words = self.links[rank - 1], ended[rank]
        if self._closing:
            return
        self._loss = words.exception(link.name) if words else EngineError(link.how_it_ended())
        self._lost.set()
        for other in self.links:
            other.answers.put(None)
        if not self._heard.wait(_STUCK_SECONDS if self._busy else 0):
            self._end(str(self._loss))

    def _settle(self, ended: dict[int, Failed | None]) -> None:
        waiting = [link for link in self.links if link.rank not in ended]
        while ready := _ready(waiting, _SETTLE_SECONDS):
            for link in ready:
                answer = _received(link)
                if not isinstance(answer, Done):
                    waiting.remove(link)
                    ended[link.rank] = answer


def _ready(
    links: Sequence[Link], seconds: float | None, *others: Connection[Any, Any]
) -> list[Link]:
    """Those that have something to say, or have ended; none when it was another that woke us."""
    woken = wait([*(link.connection for link in links), *others], seconds)
    return [link for link in links if link.connection in woken]


def _received(link: Link) -> Done | Failed | None:
    """None when the rank is gone."""
    try:
        answer = link.connection.recv()
    except (EOFError, OSError):
        return None
    assert isinstance(answer, Done | Failed)
    return answer
