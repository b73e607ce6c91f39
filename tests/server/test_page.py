"""The chat page in a real browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localllm.config import HttpConfig
from localllm.server.auth import KeyRing, load_keys
from localllm.server.listen import bind, url_of
from localllm.server.run import serve
from localllm.server.served_model import ServedModel
from localllm.server.service import Service
from tests.server.browser import Page, find_browser
from tests.server.fakes import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

ANSWER = "A llama hums. <b>Grüße</b> 日本語"
LAST = "document.querySelector('.assistant:last-child')"


class LiveServer:
    """A server on a thread of this process, so that a test can lead its engine."""

    def __init__(self, model: ServedModel, keys: KeyRing | None = None) -> None:
        self.engine: FakeEngine
        self._keys = keys
        self.url = ""
        self._model = model
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self.call(self._serving.cancel)
        self._thread.join()

    def call(self, act: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(act, *args)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = FakeEngine(self._model.tokenizer, ANSWER)
        listener = bind("127.0.0.1", 0)
        self.url = url_of(listener)
        service = Service(self.engine, lambda: self._model)
        self._serving = asyncio.ensure_future(
            serve(service, listener, self._ready.set, HttpConfig(drain_seconds=0), self._keys)
        )
        await asyncio.gather(self._serving, return_exceptions=True)


@pytest.fixture
def server(gpt2: ServedModel) -> Iterator[LiveServer]:
    with LiveServer(gpt2) as running:
        yield running


@pytest.fixture
def page(server: LiveServer) -> Iterator[Page]:
    with page_of(server) as page:
        yield page


@contextmanager
def page_of(server: LiveServer) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium on this machine")
    with Page(browser) as page:
        page.open(server.url)
        page.wait_for("ready")
        yield page


def ask(page: Page, question: str) -> None:
    page.run("document.getElementById('input').focus()")
    page.type(question)
    page.press_enter()


def test_a_conversation_of_two_turns(page: Page, server: LiveServer, gpt2: ServedModel) -> None:
    assert "gpt2" in page.run("document.getElementById('about').textContent")
    ask(page, "What is a llama?")
    page.wait_for("!running && document.querySelector('.note')")
    assert page.run(f"{LAST}.firstChild.data") == ANSWER
    assert "tokens" in page.run(f"{LAST}.querySelector('.note').textContent")
    ask(page, "And then?")
    page.wait_for("!running && document.querySelectorAll('.note').length > 1")
    prompt = gpt2.tokenizer.decode(server.engine.submitted[1].prompt, skip_special=False)
    assert [text for text in ("What is a llama?", ANSWER, "And then?") if text in prompt]
    assert prompt.index("What is a llama?") < prompt.index(ANSWER) < prompt.index("And then?")


def test_stop_keeps_what_was_written(page: Page, server: LiveServer) -> None:
    server.engine.hold_after = 3
    ask(page, "What is a llama?")
    page.wait_for(f"{LAST}.firstChild.data")
    assert page.run("document.getElementById('send').hidden")
    page.run("document.getElementById('stop').click()")
    page.wait_for("!running")
    assert ANSWER.startswith(page.run(f"{LAST}.firstChild.data"))
    assert page.run(f"{LAST}.querySelector('.note').textContent") == "stopped"
    while not server.engine.cancelled:
        page.run("1")
    assert page.run("history.length") == 2


def test_errors_are_shown_and_the_question_can_be_asked_again(
    page: Page, server: LiveServer
) -> None:
    server.call(server.engine.fail, "The engine died")
    ask(page, "What is a llama?")
    page.wait_for("document.querySelector('.note.bad')")
    assert page.run("document.querySelector('.note.bad').textContent") == "The engine died"
    assert page.run("history.length") == 0
    server.engine.failure = None
    ask(page, "What is a llama?")
    page.wait_for(f"{LAST}.textContent.includes('hums')")


def test_it_asks_for_a_key_where_one_is_wanted(gpt2: ServedModel) -> None:
    with LiveServer(gpt2, load_keys(["secret"])) as server, page_of(server) as page:
        page.run("answers = ['wrong', 'secret', 'never asked for']")
        page.run("window.prompt = () => answers.shift()")
        for _ in range(2):
            ask(page, "What is a llama?")
            page.wait_for("!running && document.querySelector('.note')")
            assert page.run(f"{LAST}.firstChild.data") == ANSWER
            page.run("document.getElementById('fresh').click()")
        assert page.run("answers.length") == 1
        page.run("apiKey = ''; window.prompt = () => null")
        ask(page, "What is a llama?")
        page.wait_for("document.querySelector('.note.bad')")
        assert "API key" in page.run("document.querySelector('.note.bad').textContent")


def test_a_new_chat_forgets(page: Page, server: LiveServer, gpt2: ServedModel) -> None:
    ask(page, "What is a llama?")
    page.wait_for("!running && document.querySelector('.note')")
    page.run("document.getElementById('fresh').click()")
    assert page.run("document.querySelectorAll('.message').length") == 0
    ask(page, "Something else")
    page.wait_for("!running && document.querySelector('.note')")
    prompt = gpt2.tokenizer.decode(server.engine.submitted[1].prompt)
    assert "llama" not in prompt


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1400])
def test_it_fits_and_can_be_read(page: Page, scheme: str, width: int, tmp_path: Path) -> None:
    page.prefer(scheme)
    page.resize(width, 700)
    ask(page, "long" * 100)
    page.wait_for("!running && document.querySelector('.note')")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelector('main').scrollWidth") <= width
    dark = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(x => x < 128)"
    )
    assert dark == (scheme == "dark")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 1000
