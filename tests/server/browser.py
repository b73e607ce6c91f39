"""A headless Chromium, driven over its DevTools pipe: enough to look at a page and use it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. A context manager; every call blocks until the browser has answered."""

    def __init__(self, browser: str, width: int = 1000, height: int = 700) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._size = (width, height)
        command = [browser, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._pid = _spawn(command, to_browser, from_browser)
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._calls = 0
        self._session: str | None = None

    def __enter__(self) -> Self:
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.resize(*self._size)
        return self

    def __exit__(self, *exc: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        done = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Returns once the JavaScript expression is true; one that fails is not true yet."""
        look = f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"
        while not self.run(look):
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                text="\r",
                windowsVirtualKeyCode=13,
            )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next_message()).get("id") != self._calls:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise EOFError("the browser ended")
            self._rest += part
        raw, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        return message


def _spawn(command: list[str], stdin: int, stdout: int) -> int:
    """Starts the browser with the pipe's ends as its descriptors 3 and 4; returns its pid."""
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (stdin, stdout)]
    try:
        return os.posix_spawn(
            command[0],
            command,
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)),
                *((os.POSIX_SPAWN_DUP2, end, 3 + index) for index, end in enumerate(high)),
            ],
        )
    finally:
        for end in high:
            os.close(end)
