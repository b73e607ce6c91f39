"""The OpenAI SDK against a real engine over a real socket, on a tiny random model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.helpers import FIXTURES
from tests.server.fakes import first_event
from tests.server.real import HANG, RealServer, real_server

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(TINY, "--backend", "reference", "--alias", "tiny/model") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny/model"
    details = client.models.retrieve("tiny/model").model_dump()
    assert details.items() >= model.model_dump().items()
    assert details["backend"] == "reference"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("another")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
def test_a_streamed_chat_is_the_whole_chat(client: openai.OpenAI, sampling: Any) -> None:
    asked: Any = {"model": "x", "messages": HELLO, "max_tokens": 40, "n": 2, **sampling}
    whole = client.chat.completions.create(**asked)
    texts, reasons = ["", ""], [None, None]
    usage = None
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert any(texts)
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["abc", "de"]
    together = client.completions.create(model="x", prompt=prompts, max_tokens=9, temperature=0)
    alone = [
        client.completions.create(model="x", prompt=prompt, max_tokens=9, temperature=0)
        for prompt in prompts
    ]
    assert [choice.text for choice in together.choices] == [a.choices[0].text for a in alone]
    assert all(answer.choices[0].text for answer in alone)


def test_the_second_time_the_prompt_is_in_the_cache(client: openai.OpenAI) -> None:
    prompt = list(range(3, 120))
    for least in (0, 96):
        answer = client.completions.create(model="x", prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 117
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert least <= cached < 117


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the context window") as error:
        client.completions.create(model="x", prompt=[5] * 10_000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="x", messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="x", messages=HELLO, top_logprobs=3)
    assert error.value.param == "top_logprobs"


def wait_until_idle(server: RealServer) -> None:
    while (report := server.health())["running"] or report["waiting"] or report["kv_usage"]:
        pass


def test_a_client_that_leaves_frees_its_memory(server: RealServer, client: openai.OpenAI) -> None:
    wait_until_idle(server)
    before = server.health()["generated_tokens"]
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 64, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG) as answer:
        first_event(answer.iter_lines())
    wait_until_idle(server)
    assert server.health()["generated_tokens"] - before < 64 * 200
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05, max_retries=0).completions.create(
            model="x", prompt="abc", max_tokens=200, n=64, extra_body={"ignore_eos": True}
        )
    wait_until_idle(server)
    assert server.health()["generated_tokens"] - before < 2 * 64 * 200


def test_health_tells_what_runs(server: RealServer) -> None:
    report = server.health()
    assert report["status"] == "ok"
    assert report["backend"] == "reference"
    assert report["context_length"] == 256
    assert report["device"]
    assert report["prompt_tokens"] > 0


def test_an_engine_that_dies_is_told_and_comes_back() -> None:
    with real_server(TINY, "--backend", "reference") as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 32, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=HANG) as answer:
            lines = answer.iter_lines()
            first_event(lines)
            server.engine_process().kill()
            *_, last = filter(None, lines)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_error"
        while server.health()["status"] != "ok":
            pass
        again = httpx.post(url, json={"prompt": "abc", "max_tokens": 3}, timeout=HANG)
        assert again.status_code == 200


def test_sigterm_drains_and_takes_the_engine_along() -> None:
    with real_server(TINY, "--backend", "reference") as server:
        engine = server.engine_process()
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 4, "stream": True}
        with (
            closing(httpx.Client(timeout=HANG)) as http,
            http.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            first_event(lines)
            server.process.send_signal(signal.SIGTERM)
            *_, last = filter(None, lines)
        assert last == "data: [DONE]"
        assert server.process.wait(HANG) == 0
        psutil.wait_procs([engine], timeout=HANG)
        assert not engine.is_running()


def test_a_taken_port_is_one_line(server: RealServer) -> None:
    port = server.url.rsplit(":", 1)[1]
    expected = f"localllm: Port {port} on 127.0.0.1 is already in use"
    with pytest.raises(AssertionError, match=expected), real_server(TINY, "--port", port):
        pass


@pytest.mark.model
def test_a_real_model_answers(smollm2: Any) -> None:
    with (
        real_server(smollm2) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG) as client,
    ):
        known = client.completions.create(
            model="default", prompt="The capital of France is", max_tokens=3, temperature=0
        )
        assert known.choices[0].text.startswith(" Paris")
        asked: list[Any] = [{"role": "user", "content": "Count from one to five."}]
        answer = client.chat.completions.create(
            model="default", messages=asked, max_tokens=100, temperature=0
        )
        assert answer.choices[0].message.content
        assert server.health()["kv_usage"] == 0
        body = {"messages": asked, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=HANG) as stream:
            lines = stream.iter_lines()  # which ends the stream when it is collected
            first_event(lines)
            assert server.health()["kv_usage"] > 0
        wait_until_idle(server)
        assert server.health()["generated_tokens"] < 2000
