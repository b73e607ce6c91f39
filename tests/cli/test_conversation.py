"""`localllm chat`: what it remembers, and what stops it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from localllm.cli.background import Background
from localllm.cli.conversation import Conversation
from localllm.cli.terminal import print_answer
from localllm.errors import ContextLengthError, EngineError
from localllm.sampling_params import SamplingParams
from localllm.server.served_model import ServedModel, load_served_model
from tests.helpers import FIXTURES, tokenizer_cases
from tests.server.fakes import FakeEngine

HANG = 120


@pytest.fixture(scope="module")
def model() -> ServedModel:
    (case,) = tokenizer_cases("gpt-2")
    return load_served_model(case.gguf)


@pytest.fixture
def engine(model: ServedModel) -> FakeEngine:
    return FakeEngine(model.tokenizer, "one two three")


@pytest.fixture
def conversation(engine: FakeEngine, model: ServedModel) -> Iterator[Conversation]:
    with Background() as loop:
        loop.run(engine.start())
        yield Conversation(loop, engine, model, SamplingParams(seed=5), "Be brief.")


def last_prompt(engine: FakeEngine, model: ServedModel) -> str:
    return model.tokenizer.decode(engine.submitted[-1].prompt, skip_special=False)


def test_it_remembers_until_cleared(
    conversation: Conversation, engine: FakeEngine, model: ServedModel
) -> None:
    assert list(conversation.answer("Count")) == ["one", " two", " three"]
    assert "Be brief." in last_prompt(engine, model)
    list(conversation.answer("Again"))
    prompt = last_prompt(engine, model)
    assert prompt.index("Count") < prompt.index("one two three") < prompt.index("Again")
    conversation.clear()
    list(conversation.answer("Anew"))
    assert "Count" not in last_prompt(engine, model)
    assert "Be brief." in last_prompt(engine, model)
    assert [submit.params.seed for submit in engine.submitted] == [5, 5, 5]


def test_a_stopped_answer_ends_in_the_engine_and_is_remembered(
    conversation: Conversation, engine: FakeEngine, model: ServedModel
) -> None:
    engine.hold_after = 2
    answer = conversation.answer("Count")
    assert [next(answer), next(answer)] == ["one", " two"]
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert engine.cancelled == [engine.submitted[0].sequence_id]
    assert not engine.live
    engine.hold_after = None
    list(conversation.answer("Go on"))
    assert "one two<|im_end|>" in last_prompt(engine, model)


def test_a_failed_answer_is_forgotten(
    conversation: Conversation, engine: FakeEngine, model: ServedModel
) -> None:
    engine.fail("The engine died")
    with pytest.raises(EngineError, match="died"):
        list(conversation.answer("Count"))
    engine.failure = None
    list(conversation.answer("Again"))
    assert "Count" not in last_prompt(engine, model)


def test_a_full_context_is_told(conversation: Conversation) -> None:
    with pytest.raises(ContextLengthError):
        list(conversation.answer("word " * 300))
    assert list(conversation.answer("Count"))


def test_the_terminal_shows_why_an_answer_ended(
    conversation: Conversation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_answer(conversation, "Count")
    assert capsys.readouterr().out == "one two three\n"
    print_answer(conversation, "word " * 300)
    assert "exceeds the context window" in capsys.readouterr().out

    def interrupted(_: str) -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "answer", interrupted)
    print_answer(conversation, "Count")
    assert capsys.readouterr().out == "one [stopped]\n"


def test_background_does_not_swallow_errors() -> None:
    async def fail() -> None:
        raise ValueError("bad")

    with Background() as loop, pytest.raises(ValueError, match="bad"):
        loop.run(fail())


def test_a_chat_through_a_pipe() -> None:
    model = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
    command = [sys.executable, "-m", "localllm", "chat", str(model)]
    done = subprocess.run(
        [*command, "--backend", "reference", "--temperature", "0"],
        input="ab\n/clear\nab\n/exit\nnever asked\n",
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    answers = done.stdout.splitlines()
    assert len(answers) % 2 == 0
    half = len(answers) // 2
    assert answers[:half] == answers[half:]
    assert any(answers)
