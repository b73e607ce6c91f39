"""What people point at an endpoint: their clients, against a real model over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.server.real import HANG, RealServer, real_server

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]  # of the clients' own code

QUESTION = "What is the capital of France?"
TOO_LONG = "word " * 3000


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RealServer]:
    with real_server(smollm2, "--ctx-size", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def answer(server: RealServer) -> str:
    """What the plain SDK gets for QUESTION."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG) as client:
        whole = client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=20,
            temperature=0,
        )
    assert whole.choices[0].message.content
    return whole.choices[0].message.content


def test_openai_async_streams_side_by_side(server: RealServer, answer: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=20,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def ask_all() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=HANG) as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert asyncio.run(ask_all()) == [answer] * 4


def test_openai_accumulates_a_stream(server: RealServer, answer: str) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG) as client,
        client.chat.completions.stream(
            model="x",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=20,
            temperature=0,
            stop=[answer[5:]],
            stream_options={"include_usage": True},
        ) as stream,
    ):
        for _ in stream:
            pass
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == answer[:5]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 20


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    sky: Literal["sunny", "cloudy"]


def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is sunny in {city}."


async def ask_async(model: Any) -> str:
    text: str = (await model.ainvoke(QUESTION)).content
    await model.root_async_client.close()
    return text


def test_langchain(server: RealServer, answer: str) -> None:
    chat_models = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed"
    )
    core = pytest.importorskip("langchain_core.exceptions")
    model = chat_models.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="x", temperature=0, max_tokens=20
    )
    whole = model.invoke(QUESTION)
    assert whole.content == answer
    assert whole.usage_metadata["output_tokens"] == 20
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer
    assert asyncio.run(ask_async(model)) == answer
    with pytest.raises(core.ContextOverflowError, match="exceeds the context window"):
        model.invoke(TOO_LONG)
    model.max_tokens = 200
    tools = model.bind_tools([get_weather], tool_choice="get_weather")
    (call,) = tools.invoke("How is the weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    assert call["args"].keys() == {"city"}
    structured = model.with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke("How is the weather?"), Weather)
    model.root_client.close()


def test_litellm(server: RealServer, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch one
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    asked: dict[str, Any] = {
        "model": "openai/x",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 20,
        "temperature": 0,
    }
    assert litellm.completion(**asked).choices[0].message.content == answer
    stream = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": TOO_LONG}]})


LM_EVAL_DOCS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": [" Berlin", " Paris"], "answer": 1},
    {"question": "Two plus two equals", "choices": [" four", " banana"], "answer": 0},
    {"question": "The opposite of hot is", "choices": [" cold", " table"], "answer": 0},
]
LM_EVAL_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {docs}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_lm_eval(server: RealServer, tmp_path: Path) -> None:
    """Its `local-completions`, with token ids, echoed log-probabilities and our tokenizer."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in LM_EVAL_DOCS))
    (tmp_path / "local_choice.yaml").write_text(LM_EVAL_TASK.format(docs=docs))
    url = f"{server.url}/v1/completions"
    arguments = f"model=x,base_url={url},tokenizer_backend=remote,num_concurrent=2"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", arguments, "--tasks", "local_choice"),
            *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
        ],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]["local_choice"]
    assert results["acc,none"] == 1.0
