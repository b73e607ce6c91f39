"""Keeps an engine process alive, and tells those who wait for it when it is not."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import localllm.errors
from localllm.config import EngineConfig
from localllm.engine.admission import Admission
from localllm.engine.messages import (
    Cancel,
    Crash,
    EngineStats,
    Fatal,
    FromEngine,
    Loading,
    Ready,
    SequenceNews,
    StepResults,
    Stop,
    Submit,
    ToEngine,
)
from localllm.engine.spawn import EngineProcess, start_process
from localllm.errors import EngineError, LocalLLMError, ModelError, RequestError

DEFAULT_HANG_SECONDS = 300.0  # a full step of a large model on a slow machine takes minutes
_IDLE_SECONDS = 10.0  # an engine without work sends a heartbeat every second
_CHECK_SECONDS = 1.0
_MOST_CRASHES = 3
_CRASH_SECONDS = 60.0
_STOP_SECONDS = 2.0

logger = logging.getLogger("localllm.engine")


class Supervisor:
    """One thread starts the process, listens to it, and starts it again when it dies.

    `on_news` is called by that thread, once per message. When the process dies every open sequence
    gets an error as its last news; nothing is submitted again. An engine that has been ready and is
    silent for `hang_seconds` counts as dead. After a fault in the first load, or three crashes
    within a minute, it stays dead and `submit` says why.

    Methods may be called by any thread and do not block, save `close`.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_news: Callable[[tuple[SequenceNews, ...]], None],
        hang_seconds: float = DEFAULT_HANG_SECONDS,
    ) -> None:
        self.first_ready: Future[Ready] = Future()  # or why there will never be one
        self.ready: Ready | None = None  # as of the last time that it was
        self.stats = EngineStats()
        self.restarts = 0  # engines that became ready after the first one
        self._config = config
        self._on_news = on_news
        self._hang_seconds = hang_seconds
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._process: EngineProcess | None = None
        self._writer: _Writer | None = None  # while an engine is ready
        self._failure: LocalLLMError | None = None  # why there is none, for good
        self._closing = False
        self._crashes: deque[float] = deque(maxlen=_MOST_CRASHES)
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine was last heard of. It is silent while a step runs."""
        return time.monotonic() - self._last_beat

    @property
    def healthy(self) -> bool:
        patience = self._hang_seconds if self._open else _IDLE_SECONDS
        return self._writer is not None and self.heartbeat_age < patience

    @property
    def failed(self) -> str | None:
        """Why there is no engine and will not be one again; None while there may be."""
        return None if self._failure is None else str(self._failure)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Submit) -> None:
        """RequestError if the model cannot serve it, EngineError if there is no engine now."""
        with self._lock:
            if self._writer is None or self.ready is None:
                raise EngineError(str(self._failure or "The engine is loading the model"))
            Admission(self.ready.context, self.ready.vocab_size).check(request)
            if request.sequence_id in self._open:
                raise ValueError(f"sequence {request.sequence_id!r} is open already")
            self._open.add(request.sequence_id)
            self._writer.send(request)

    def cancel(self, sequence_id: str) -> None:
        with self._lock:
            if self._writer is not None and sequence_id in self._open:
                self._writer.send(Cancel(sequence_id))

    def close(self) -> None:
        """Ends the process; sequences that are still open get an error."""
        with self._lock:
            self._closing = True
            if self._writer is not None:
                self._writer.send(Stop())
            elif self._process is not None:
                self._process.popen.kill()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._process is not None:
            self._process.popen.kill()
            self._thread.join()

    def _run(self) -> None:
        while (process := self._start_process()) is not None:
            self._bury(process, self._listen(process))
        if not self.first_ready.done():
            self.first_ready.set_exception(self._failure)

    def _start_process(self) -> EngineProcess | None:
        """None when there shall be no more, with the reason in `_failure`."""
        with self._lock:
            if self._closing:
                self._failure = EngineError("The engine is closed")
            elif self._failure is None:
                try:
                    self._process = start_process(self._config)
                except OSError as error:
                    self._failure = EngineError(f"The engine process does not start: {error}")
            return self._process if self._failure is None else None

    def _listen(self, process: EngineProcess) -> str:
        """Until the process is of no more use; says why."""
        try:
            while True:
                if process.connection.poll(_CHECK_SECONDS):
                    message = process.connection.recv()
                    if isinstance(message, Crash):
                        return f"{process.name} gave up: {message.reason}"
                    self._take(message, process)
                elif self._writer is not None and self.heartbeat_age > self._hang_seconds:
                    return f"{process.name} did not answer for {self._hang_seconds:g} s"
        except (EOFError, OSError):
            return process.how_it_ended()
        except Exception as error:  # those who wait must hear of it, whatever it is
            logger.exception("listening to the engine failed")
            return f"{process.name} was given up: {type(error).__name__}: {error}"

    def _take(self, message: FromEngine, process: EngineProcess) -> None:
        self._last_beat = time.monotonic()
        match message:
            case StepResults(news, stats):
                self.stats = stats
                if news:
                    with self._lock:
                        self._open.difference_update(n.sequence_id for n in news if n.finish_reason)
                    self._on_news(news)
            case Loading(text):
                logger.info("%s", text)
            case Ready():
                with self._lock:
                    self.ready = message
                    self._writer = _Writer(process)
                if not self.first_ready.done():
                    self.first_ready.set_result(message)
                else:
                    self.restarts += 1
            case Fatal():
                self._failure = _error_of(message)

    def _bury(self, process: EngineProcess, death: str) -> None:
        process.kill()
        with self._lock:
            writer, self._writer = self._writer, None
            lost, self._open = self._open, set()
            self._process = None
            self.stats = EngineStats()
            if self._failure is None:
                self._failure = self._verdict(death)
        if writer is not None:
            writer.close()
        process.connection.close()
        if self.first_ready.done() and not self._closing:
            then = "starting it again" if self._failure is None else "it is not started again"
            logger.error("%s; %d open sequences are lost; %s", death, len(lost), then)
        if lost:
            why = str(self._failure or death)
            self._on_news(
                tuple(SequenceNews(name, finish_reason="error", error=why) for name in lost)
            )

    def _verdict(self, death: str) -> LocalLLMError | None:
        """Why the engine is not to be started again; None if it is."""
        if self._closing:
            return EngineError("The engine is closed")
        if not self.first_ready.done():
            return EngineError(f"{death} while it loaded the model")
        self._crashes.append(time.monotonic())
        if (
            len(self._crashes) == _MOST_CRASHES
            and self._crashes[-1] - self._crashes[0] < _CRASH_SECONDS
        ):
            return EngineError(f"{death}, the third time within a minute; it is not started again")
        return None


class _Writer:
    """Sends from a thread of its own, since the engine only reads between two steps."""

    def __init__(self, process: EngineProcess) -> None:
        self._messages: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._connection = process.connection
        self._thread = threading.Thread(target=self._run, name="localllm-send", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """After the process has ended, so that nothing blocks."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the listening thread notices too


def _error_of(fatal: Fatal) -> LocalLLMError:
    """The exception that was raised in the engine process."""
    kind = getattr(localllm.errors, fatal.kind, None)
    if isinstance(kind, type) and issubclass(kind, (ModelError, EngineError)):
        return kind(fatal.message)
    if kind is RequestError:
        return RequestError(fatal.message)
    return EngineError(fatal.message)
