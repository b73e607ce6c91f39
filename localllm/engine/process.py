"""The engine's own process: `python -m localllm.engine.process FD PARENT`.

FD is one end of a socket pair, PARENT the process that has the other. The first message on it is
the EngineConfig; then the ones of `messages` go both ways. The process ends with its parent.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from localllm.child_process import on_end, tie_to_parent
from localllm.config import EngineConfig
from localllm.engine.core import EngineCore
from localllm.engine.loader import load_engine
from localllm.engine.messages import (
    Cancel,
    Crash,
    Fatal,
    FromEngine,
    Loading,
    StepResults,
    Stop,
    Submit,
    ToEngine,
)
from localllm.errors import EngineError, LocalLLMError, ModelError

HEARTBEAT_SECONDS = 1.0
_NAME = "localllm-engine"


class Line:
    """The process's end of the socket pair. Any thread may send."""

    def __init__(self, fd: int) -> None:
        self._connection: Connection[FromEngine, ToEngine | EngineConfig] = Connection(fd)
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def send(self, message: FromEngine) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self) -> ToEngine | EngineConfig:
        """Blocks; EOFError when the parent is gone."""
        return self._connection.recv()

    def has_message(self, seconds: float) -> bool:
        """Waits for one, using no CPU. True also when the parent is gone."""
        return bool(self._poll.poll(seconds * 1000))


def main() -> None:
    tie_to_parent(_NAME, int(sys.argv[2]))
    logging.basicConfig(level=logging.WARNING, format=f"{_NAME}: %(message)s")
    line = Line(int(sys.argv[1]))
    on_end(lambda reason: line.send(Crash(reason)))
    try:
        config = line.receive()
        assert isinstance(config, EngineConfig)
        if (core := _load(config, line)) is not None:
            _serve(core, line)
            core.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is left to tell, or to wait for threads
    except EngineError as error:
        line.send(Crash(str(error)))
        os._exit(1)  # what is lost may be waited for for ever


def _load(config: EngineConfig, line: Line) -> EngineCore | None:
    try:
        core = load_engine(config, lambda text: line.send(Loading(text)))
    except EngineError:
        raise  # another try may go well
    except LocalLLMError as error:
        line.send(Fatal(type(error).__name__, str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except MemoryError as error:
        line.send(Fatal("InsufficientMemoryError", f"{config.model}: out of memory: {error}"))
    except OSError as error:
        line.send(Fatal(ModelError.__name__, str(error)))
    except Exception as error:
        traceback.print_exc()
        line.send(Fatal("EngineError", f"internal error: {type(error).__name__}: {error}"))
    else:
        line.send(core.ready)
        return core
    return None


def _serve(core: EngineCore, line: Line) -> None:
    """Until told to stop. Takes what has come before each step, so a cancel waits for one step.

    After a second without work the books are checked, once: if they do not balance, it is better to
    start again than to give one request another's memory.
    """
    checked = True
    while True:
        if not core.has_work and not line.has_message(HEARTBEAT_SECONDS):
            if not checked:
                core.check_integrity()
                checked = True
            line.send(StepResults((), core.stats))
            continue
        while line.has_message(0):
            match line.receive():
                case Submit() as request:
                    core.add(request)
                case Cancel(sequence_id):
                    core.cancel(sequence_id)
                case Stop():
                    return
        if core.has_work:
            line.send(core.step(lambda: line.has_message(0)))
            checked = False


if __name__ == "__main__":
    main()
